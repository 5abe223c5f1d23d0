"""Scheduling: how much of the drafts to verify, whether to draft at all, and what a step costs."""
