"""Text on both sides of the model: tokenizer, chat template, incremental detokenizer, stop strings."""

from __future__ import annotations
