"""Verification: which guesses stand, without moving the target's distribution."""
