"""Ops: the contract of each, its portable torch implementation, and the faster providers of it."""
