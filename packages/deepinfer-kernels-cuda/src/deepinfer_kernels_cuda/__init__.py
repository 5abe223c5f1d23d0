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
    from .dense import Weighed, dense_linear, weighed_like
    from .experts import PackedExperts, moe_experts, prepare_experts
    from .libraries import (
        DeepEpParallel,
        LibraryRow,
        flash_mla_decode,
        flash_mla_decode_v4,
        flash_mla_prefill,
        flash_mla_schedule,
        library_reason,
        library_table,
    )
    from .llama import MarkovStep, arrivals, cut_for, markov_step, paged_gqa, rope_gqa
    from .llama_rows import argmax, cache_slots, llama_norm, rope_insert, silu_mul
    from .mhc import HyperMix, MhcStep, mhc_collapse, mhc_post, mhc_pre, mhc_step
    from .microscaled import MxLinear, dequantize, mx_linear
    from .output import engram_gate, engram_update, grouped_output
    from .parallel import ExpertParallel
    from .peers import PeerParallel, peer_reason
    from .providers import MeasuredChoice, find_library
    from .ragged import Pieces, cut_rows, ragged_inputs
    from .records import (
        kv_gather,
        kv_insert,
        latent_insert,
        norm_rope_insert,
        rope_round,
        v4_gather,
        v4_insert,
    )
    from .routing import router
    from .rows import compress, engram_gather, rms_norm, rope
    from .sampling import Verification, apply_bitmask, sample, verify_drafts
    from .selection import candidate_mask, indexer_logits, topk_lowest_index
    from .v41_step import (
        EntryIndex,
        WindowIndex,
        clamped_swiglu,
        entry_index,
        pool_groups,
        selected_slots,
        window_index,
    )
    from .weights import MxWeights, mx_weights, pack_sm90

_LAZY = {
    "ExpertParallel": "parallel",
    "PeerParallel": "peers",
    "peer_reason": "peers",
    "MeasuredChoice": "providers",
    "find_library": "providers",
    "sparse_mla_decode": "attention",
    "sparse_mla_prefill": "attention",
    "MxLinear": "microscaled",
    "PackedExperts": "experts",
    "dequantize": "microscaled",
    "moe_experts": "experts",
    "mx_linear": "microscaled",
    "prepare_experts": "experts",
    "MarkovStep": "llama",
    "apply_bitmask": "sampling",
    "markov_step": "llama",
    "arrivals": "llama",
    "cut_for": "llama",
    "paged_gqa": "llama",
    "rope_gqa": "llama",
    "argmax": "llama_rows",
    "Weighed": "dense",
    "dense_linear": "dense",
    "weighed_like": "dense",
    "Pieces": "ragged",
    "cut_rows": "ragged",
    "ragged_inputs": "ragged",
    "cache_slots": "llama_rows",
    "llama_norm": "llama_rows",
    "rope_insert": "llama_rows",
    "silu_mul": "llama_rows",
    "sample": "sampling",
    "HyperMix": "mhc",
    "MhcStep": "mhc",
    "mhc_collapse": "mhc",
    "mhc_post": "mhc",
    "mhc_pre": "mhc",
    "mhc_step": "mhc",
    "compress": "rows",
    "engram_gather": "rows",
    "kv_gather": "records",
    "kv_insert": "records",
    "norm_rope_insert": "records",
    "latent_insert": "records",
    "rms_norm": "rows",
    "rope": "rows",
    "rope_round": "records",
    "v4_gather": "records",
    "v4_insert": "records",
    "DeepEpParallel": "libraries",
    "LibraryRow": "libraries",
    "flash_mla_decode": "libraries",
    "flash_mla_decode_v4": "libraries",
    "flash_mla_prefill": "libraries",
    "flash_mla_schedule": "libraries",
    "library_reason": "libraries",
    "library_table": "libraries",
    "candidate_mask": "selection",
    "indexer_logits": "selection",
    "Verification": "sampling",
    "verify_drafts": "sampling",
    "engram_gate": "output",
    "engram_update": "output",
    "grouped_output": "output",
    "router": "routing",
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
    "DeepEpParallel",
    "EntryIndex",
    "ExpertParallel",
    "HyperMix",
    "KernelError",
    "LibraryRow",
    "MarkovStep",
    "MeasuredChoice",
    "MhcStep",
    "MxLinear",
    "MxWeights",
    "PackedExperts",
    "PeerParallel",
    "Pieces",
    "RecordFormat",
    "UnsupportedDeviceError",
    "Verification",
    "Weighed",
    "WindowIndex",
    "apply_bitmask",
    "argmax",
    "arrivals",
    "cache_slots",
    "candidate_mask",
    "capability_table",
    "clamped_swiglu",
    "compress",
    "cut_for",
    "cut_rows",
    "dense_linear",
    "dequantize",
    "device_arch",
    "engram_gate",
    "engram_gather",
    "engram_update",
    "entry_index",
    "find_library",
    "flash_mla_decode",
    "flash_mla_decode_v4",
    "flash_mla_prefill",
    "flash_mla_schedule",
    "grouped_output",
    "indexer_logits",
    "is_supported",
    "kv_gather",
    "kv_insert",
    "latent_insert",
    "library_reason",
    "library_table",
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
    "peer_reason",
    "pool_groups",
    "prepare_experts",
    "ragged_inputs",
    "rms_norm",
    "rope",
    "rope_gqa",
    "rope_insert",
    "rope_round",
    "rotation",
    "router",
    "sample",
    "selected_slots",
    "silu_mul",
    "sparse_mla_decode",
    "sparse_mla_prefill",
    "step_inputs",
    "topk_lowest_index",
    "v4_gather",
    "v4_insert",
    "verify_drafts",
    "weighed_like",
    "window_index",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
