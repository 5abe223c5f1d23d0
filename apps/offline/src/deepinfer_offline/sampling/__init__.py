"""Sampling: parameters with vLLM's names, and a batched sampler whose draws do not depend on the batch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from deepinfer_offline.sampling.params import SamplingParams, StructuredOutputs

if TYPE_CHECKING:
    from deepinfer_offline.sampling.batch import Logprobs, SampledTokens, SamplingBatch, SamplingTable
    from deepinfer_offline.sampling.sampler import Sampler

_HOMES = {  # these import torch, which takes two seconds that a wrong flag should not cost
    "Logprobs": "batch",
    "SampledTokens": "batch",
    "Sampler": "sampler",
    "SamplingBatch": "batch",
    "SamplingTable": "batch",
}

__all__ = [
    "Logprobs",
    "SampledTokens",
    "Sampler",
    "SamplingBatch",
    "SamplingParams",
    "SamplingTable",
    "StructuredOutputs",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"deepinfer_offline.sampling.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
