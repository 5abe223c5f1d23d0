"""Adapters: the thin code that puts this package's mechanisms into other engines."""
