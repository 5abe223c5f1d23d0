"""Adapters: the thin code that puts these kernels into other engines."""
