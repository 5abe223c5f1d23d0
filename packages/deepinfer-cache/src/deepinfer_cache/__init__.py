"""Paged KV blocks, prefix index, bounded replay and storage tiers for LLM engines."""
