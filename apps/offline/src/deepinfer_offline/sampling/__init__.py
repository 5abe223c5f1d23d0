"""Sampling: parameters with vLLM's names, and a batched sampler whose draws do not depend on the batch."""

from __future__ import annotations

from deepinfer_offline.sampling.batch import Logprobs, SampledTokens, SamplingBatch, SamplingTable
from deepinfer_offline.sampling.params import SamplingParams, StructuredOutputs
from deepinfer_offline.sampling.sampler import Sampler

__all__ = [
    "Logprobs",
    "SampledTokens",
    "Sampler",
    "SamplingBatch",
    "SamplingParams",
    "SamplingTable",
    "StructuredOutputs",
]
