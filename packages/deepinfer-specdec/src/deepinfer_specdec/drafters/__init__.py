"""Drafters: what to guess. `base` has the protocol."""
