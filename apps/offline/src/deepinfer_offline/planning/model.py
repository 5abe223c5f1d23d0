"""The tokenizer to plan with; no weights are read."""

from __future__ import annotations

from typing import Any

from deepinfer_offline.text.tokenizer import load_tokenizer
from deepinfer_offline.weights.source import resolve_model


def find_tokenizer(model: str) -> Any:
    """The tokenizer of an embedded model, a model folder or a GGUF file; None for a folder without one.

    Raises:
        EngineStartError: there is no such model, or its tokenizer cannot be read.
    """
    source = resolve_model(model)
    return load_tokenizer(source.path, name=source.name)
