"""The grammar libraries behind one small protocol."""
