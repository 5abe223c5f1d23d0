"""Ops of DeepSig V4.1: the contract, and the portable torch implementation that is right on every device.

Kernel packages implement the same names with the same signatures; `v41-model` in the docs has the formulas.
"""

from __future__ import annotations

from deepinfer_offline.ops.deepsig.compressor import compress
from deepinfer_offline.ops.deepsig.engram import engram_gather, engram_rows, engram_update
from deepinfer_offline.ops.deepsig.experts import ExpertWeights, clamped_swiglu, moe_experts, shared_expert
from deepinfer_offline.ops.deepsig.indexer import candidate_mask, indexer_logits
from deepinfer_offline.ops.deepsig.markov import MarkovStep, confidence, markov_step
from deepinfer_offline.ops.deepsig.mhc import HyperMix, mhc_collapse, mhc_post, mhc_pre, sinkhorn, spread_scale
from deepinfer_offline.ops.deepsig.norm import rms_norm
from deepinfer_offline.ops.deepsig.records import (
    LAYOUT_VERSION,
    RecordFormat,
    decode_records,
    encode_records,
    kv_gather,
    kv_insert,
    record_bytes,
    round_to_record,
)
from deepinfer_offline.ops.deepsig.rope import RotaryTable, apply_rope, rope_frequencies, rotary_table
from deepinfer_offline.ops.deepsig.router import router
from deepinfer_offline.ops.deepsig.sparse_mla import attend, sparse_mla_decode, sparse_mla_prefill
from deepinfer_offline.ops.deepsig.topk import mask_to_indices, topk_lowest_index, topk_mask

__all__ = [
    "LAYOUT_VERSION",
    "ExpertWeights",
    "HyperMix",
    "MarkovStep",
    "RecordFormat",
    "RotaryTable",
    "apply_rope",
    "attend",
    "candidate_mask",
    "clamped_swiglu",
    "compress",
    "confidence",
    "decode_records",
    "encode_records",
    "engram_gather",
    "engram_rows",
    "engram_update",
    "indexer_logits",
    "kv_gather",
    "kv_insert",
    "markov_step",
    "mask_to_indices",
    "mhc_collapse",
    "mhc_post",
    "mhc_pre",
    "moe_experts",
    "record_bytes",
    "rms_norm",
    "rope_frequencies",
    "rotary_table",
    "round_to_record",
    "router",
    "shared_expert",
    "sinkhorn",
    "sparse_mla_decode",
    "sparse_mla_prefill",
    "spread_scale",
    "topk_lowest_index",
    "topk_mask",
]
