"""Job planning and step scheduling for LLM engines."""
