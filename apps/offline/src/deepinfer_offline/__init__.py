"""DeepInfer: the offline LLM inference engine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer_offline.engine.base import Completion, RequestError, RequestOutput
    from deepinfer_offline.llm import LLM
    from deepinfer_offline.sampling.params import SamplingParams, StructuredOutputs

__all__ = ["LLM", "Completion", "RequestError", "RequestOutput", "SamplingParams", "StructuredOutputs"]

# libgomp reads this when torch loads it. Its threads spin for each other between operations, by default so long that any
# other work on the machine makes a step several times slower; a short spin costs an idle machine next to nothing.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

_HOMES = {
    "LLM": "deepinfer_offline.llm",
    "Completion": "deepinfer_offline.engine.base",
    "RequestError": "deepinfer_offline.engine.base",
    "RequestOutput": "deepinfer_offline.engine.base",
    "SamplingParams": "deepinfer_offline.sampling.params",
    "StructuredOutputs": "deepinfer_offline.sampling.params",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: the command line starts without torch."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    found = getattr(import_module(home), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
