"""The loaded weights, grouped by what uses them. Float tensors are in the model's dtype unless a field says float32."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor

from deepinfer_offline.ops.deepsig import ExpertWeights


@dataclass(frozen=True, slots=True)
class HyperWeights:
    """One mHC site, float32: fn [S * (S + 2), S * d], base and scale [S * (S + 2)]."""

    fn: Tensor
    base: Tensor
    scale: Tensor


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Projections of one attention layer.

    `wqkv_a` [q_lora + head_dim, d] is wq_a above wkv: both read the same input.
    `wo_a` is [groups, o_lora, heads * head_dim / groups].
    """

    wqkv_a: Tensor
    q_norm: Tensor
    wq_b: Tensor
    kv_norm: Tensor
    sink: Tensor  # float32 [heads]
    wo_a: Tensor
    wo_b: Tensor


@dataclass(frozen=True, slots=True)
class CompressorWeights:
    """wkv [head_dim, d]; ratio 1 has no wgate and projects in the model's dtype, otherwise both are float32.

    `wk` [index_head_dim, head_dim] and `k_norm` make the index key of an entry.
    """

    wkv: Tensor
    wgate: Tensor | None
    norm: Tensor
    wk: Tensor
    k_norm: Tensor


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    """wq_b [heads * index_head_dim, q_lora], weights_proj [heads, d]."""

    wq_b: Tensor
    weights_proj: Tensor


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """gate float32 [experts, d], bias float32 [experts]; shared_gate_up [2m, d], shared_down [d, m].

    `experts` are `ExpertWeights`, or what a kernel package made of them.
    """

    gate: Tensor
    bias: Tensor
    experts: ExpertWeights | Any
    shared_gate_up: Tensor
    shared_down: Tensor


@dataclass(frozen=True, slots=True)
class EngramWeights:
    """table [rows, n] (E4M3 with `table_scale`, or float), wkv [(S + 1) * d, m * n], q_weight and k_weight [S, d]."""

    table: Tensor
    table_scale: Tensor | None
    wkv: Tensor
    q_weight: Tensor
    k_weight: Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """A layer of the target, or a stage of the draft (which has no compressor, indexer or Engram)."""

    attn_norm: Tensor
    ffn_norm: Tensor
    hc_attn: HyperWeights
    hc_ffn: HyperWeights
    attention: AttentionWeights
    moe: MoeWeights
    compressor: CompressorWeights | None = None
    indexer: IndexerWeights | None = None
    engram: EngramWeights | None = None


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """main_proj [d, targets * d], main_norm and norm [d], markov embed and head [vocab, rank], confidence [1, d + rank]."""

    stages: tuple[LayerWeights, ...]
    main_proj: Tensor
    main_norm: Tensor
    norm: Tensor
    markov_embed: Tensor
    markov_head: Tensor
    confidence: Tensor


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """embed [vocab, d]; head float32 [vocab, d]; norm [d]."""

    embed: Tensor
    head: Tensor
    norm: Tensor
    layers: tuple[LayerWeights, ...]
    draft: DraftWeights | None = None


def tensors_of(node: Any) -> list[Tensor]:
    """Every tensor below a weights object."""
    if isinstance(node, Tensor):
        return [node]
    if isinstance(node, tuple):
        return [tensor for item in node for tensor in tensors_of(item)]
    if is_dataclass(node):
        return [tensor for field in fields(node) for tensor in tensors_of(getattr(node, field.name))]
    return []


def weight_bytes(node: Any) -> int:
    """Bytes of the storages below a weights object, each counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_of(node)}
    return sum(storages.values())
