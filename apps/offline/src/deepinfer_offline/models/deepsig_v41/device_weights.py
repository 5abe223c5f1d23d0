"""A layer's weights as the CUDA kernels take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer_offline.models.deepsig_v41.config import V41Config
from deepinfer_offline.models.deepsig_v41.weights import HyperWeights, LayerWeights


@dataclass(frozen=True)
class DeviceSite:
    """A hyper-connection site as the kernel takes it: scale [3]."""

    fn: Tensor
    base: Tensor
    scale: Tensor
    norm: Tensor

    @classmethod
    def of(cls, hyper: HyperWeights, norm: Tensor, streams: int) -> DeviceSite:
        return cls(hyper.fn, hyper.base, hyper.scale[[0, streams, 2 * streams]].contiguous(), norm)


@dataclass(frozen=True)
class DeviceLayer:
    """A layer's weights as the kernels take them.

    Attributes:
        source: as loaded.
        attention, ffn: its two sites.
        gate: of the router, in the activations' dtype where that is exact.
        experts: repacked.
        wo_a: [groups, width, rank].
        compressor: of a pair source, values and gates: float32 [2 * head_dim, d], or as bfloat16 parts whose sum it is,
            [parts * 2 * head_dim, d]; None otherwise.
        index_weights: of the indexer's heads, scaled.
    """

    source: LayerWeights
    attention: DeviceSite
    ffn: DeviceSite
    gate: Tensor
    experts: Any
    wo_a: Tensor
    compressor: Tensor | None
    index_weights: Tensor | None

    @classmethod
    def prepare(cls, layer: LayerWeights, c: V41Config, dtype: torch.dtype) -> DeviceLayer:
        """Convert what a kernel wants otherwise; everything else is shared with `layer`."""
        gate = layer.moe.gate.to(dtype)
        exact = torch.equal(gate.float(), layer.moe.gate)
        compressor, scaled = None, None
        if layer.compressor is not None and layer.compressor.wgate is not None:
            compressor = split_weight(torch.cat((layer.compressor.wkv, layer.compressor.wgate)), dtype)
        if layer.indexer is not None:
            scaled = layer.indexer.weights_proj * (c.index_head_dim**-0.5 * c.index_n_heads**-0.5)
        return cls(
            source=layer,
            attention=DeviceSite.of(layer.hc_attn, layer.attn_norm, c.hc_mult),
            ffn=DeviceSite.of(layer.hc_ffn, layer.ffn_norm, c.hc_mult),
            gate=gate.contiguous() if exact else layer.moe.gate.contiguous(),
            experts=layer.moe.experts,
            wo_a=layer.attention.wo_a.transpose(1, 2),
            compressor=compressor,
            index_weights=scaled,
        )


def split_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A float32 matrix as one or two bfloat16 parts side by side: 16 bits of it, below what the activations resolve."""
    if dtype != torch.bfloat16:
        return weight
    high = weight.bfloat16()
    low = (weight - high.float()).bfloat16()
    return torch.cat((high, low)) if bool(low.any()) else high


def wide_product(x: Tensor, weight: Tensor, rows: int) -> Tensor:
    """float32 [T, rows] of x and what `split_weight` made of a matrix."""
    if weight.dtype == torch.float32:
        return functional.linear(x.float(), weight)
    product = torch.mm(x, weight.t(), out_dtype=torch.float32)
    return product if weight.shape[0] == rows else product[:, :rows] + product[:, rows:]
