"""The job layer: a batch file in, one answer a line out, and nothing lost in between."""
