"""Drafting and load-aware verification for speculative decoding."""
