"""Plain torch twins of every op: right on any device, in the precision of their inputs, and slow."""
