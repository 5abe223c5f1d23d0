"""Triton and Gluon kernels for DeepSig V4.1 and Llama-class models on NVIDIA GPUs.

Importing the package needs only torch; Triton is loaded by the first call of a kernel.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .capability import CapabilityRow, capability_table, device_arch, is_supported
from .errors import ArgumentError, KernelError, UnsupportedDeviceError
from .layouts import FP8, LAYOUT_VERSION, MXFP4, NVFP4, RecordFormat

if TYPE_CHECKING:
    from .attention import sparse_mla_decode, sparse_mla_prefill
    from .experts import MxLinear, PackedExperts, dequantize, moe_experts, mx_linear, prepare_experts
    from .llama import MarkovStep, apply_bitmask, markov_step, paged_gqa, sample
    from .llama_rows import argmax, cache_slots, llama_norm, rope_insert, silu_mul
    from .mhc import HyperMix, MhcStep, mhc_collapse, mhc_post, mhc_pre, mhc_step
    from .parallel import ExpertParallel
    from .providers import MeasuredChoice, find_library
    from .router import router
    from .rows import compress, engram_gather, kv_gather, kv_insert, norm_rope_insert, rms_norm, rope
    from .selection import candidate_mask, indexer_logits, topk_lowest_index
    from .v41_step import EntryIndex, WindowIndex, clamped_swiglu, entry_index, pool_groups, rotation, selected_slots, step_inputs, window_index
    from .weights import MxWeights, mx_weights, pack_sm90

_LAZY = {
    "ExpertParallel": "parallel",
    "MeasuredChoice": "providers",
    "find_library": "providers",
    "sparse_mla_decode": "attention",
    "sparse_mla_prefill": "attention",
    "MxLinear": "experts",
    "PackedExperts": "experts",
    "dequantize": "experts",
    "moe_experts": "experts",
    "mx_linear": "experts",
    "prepare_experts": "experts",
    "MarkovStep": "llama",
    "apply_bitmask": "llama",
    "markov_step": "llama",
    "paged_gqa": "llama",
    "argmax": "llama_rows",
    "cache_slots": "llama_rows",
    "llama_norm": "llama_rows",
    "rope_insert": "llama_rows",
    "silu_mul": "llama_rows",
    "sample": "llama",
    "HyperMix": "mhc",
    "MhcStep": "mhc",
    "mhc_collapse": "mhc",
    "mhc_post": "mhc",
    "mhc_pre": "mhc",
    "mhc_step": "mhc",
    "compress": "rows",
    "engram_gather": "rows",
    "kv_gather": "rows",
    "kv_insert": "rows",
    "norm_rope_insert": "rows",
    "rms_norm": "rows",
    "rope": "rows",
    "candidate_mask": "selection",
    "indexer_logits": "selection",
    "router": "router",
    "topk_lowest_index": "selection",
    "MxWeights": "weights",
    "rotation": "v41_step",
    "step_inputs": "v41_step",
    "window_index": "v41_step",
    "entry_index": "v41_step",
    "selected_slots": "v41_step",
    "pool_groups": "v41_step",
    "clamped_swiglu": "v41_step",
    "WindowIndex": "v41_step",
    "EntryIndex": "v41_step",
    "mx_weights": "weights",
    "pack_sm90": "weights",
}

__all__ = [
    "FP8",
    "LAYOUT_VERSION",
    "MXFP4",
    "NVFP4",
    "ArgumentError",
    "CapabilityRow",
    "EntryIndex",
    "ExpertParallel",
    "HyperMix",
    "KernelError",
    "MarkovStep",
    "MeasuredChoice",
    "MhcStep",
    "MxLinear",
    "MxWeights",
    "PackedExperts",
    "RecordFormat",
    "UnsupportedDeviceError",
    "WindowIndex",
    "apply_bitmask",
    "argmax",
    "cache_slots",
    "candidate_mask",
    "capability_table",
    "clamped_swiglu",
    "compress",
    "dequantize",
    "device_arch",
    "engram_gather",
    "entry_index",
    "find_library",
    "indexer_logits",
    "is_supported",
    "kv_gather",
    "kv_insert",
    "llama_norm",
    "markov_step",
    "mhc_collapse",
    "mhc_post",
    "mhc_pre",
    "mhc_step",
    "moe_experts",
    "mx_linear",
    "mx_weights",
    "norm_rope_insert",
    "pack_sm90",
    "paged_gqa",
    "pool_groups",
    "prepare_experts",
    "rms_norm",
    "rope",
    "rope_insert",
    "rotation",
    "router",
    "sample",
    "selected_slots",
    "silu_mul",
    "sparse_mla_decode",
    "sparse_mla_prefill",
    "step_inputs",
    "topk_lowest_index",
    "window_index",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
