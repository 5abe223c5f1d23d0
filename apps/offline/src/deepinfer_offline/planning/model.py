"""The model to plan for, as far as planning needs it; no weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepinfer_offline.engine.factory import cache_page
from deepinfer_offline.engine.options import EngineOptions
from deepinfer_offline.text.tokenizer import load_tokenizer
from deepinfer_offline.weights.source import resolve_model


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """What planning needs of a model.

    Attributes:
        tokenizer: `deepinfer_offline.text.tokenizer.Tokenizer`; None for a folder without one.
        engine: the engine that would run it.
        block_size: tokens of the blocks in which that engine shares prefixes.
    """

    tokenizer: Any
    engine: str
    block_size: int


def find_model(options: EngineOptions) -> PlannedModel:
    """Look at an embedded model, a model folder or a GGUF file as a run with these options would.

    Raises:
        EngineStartError: there is no such model, its tokenizer cannot be read, or the engine asked for does not run it.
    """
    source = resolve_model(options.model)
    engine, block_size = cache_page(options, source)
    return PlannedModel(load_tokenizer(source.path, name=source.name), engine, block_size)
