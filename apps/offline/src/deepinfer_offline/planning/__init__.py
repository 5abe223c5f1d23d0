"""How cache-friendly a job is, told without running a model."""
