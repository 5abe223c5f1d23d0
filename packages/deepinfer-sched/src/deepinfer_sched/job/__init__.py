"""Planning of whole jobs."""
