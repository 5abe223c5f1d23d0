"""One layer: Engram, attention and experts between hyper-connections. `v41-model` section 2.2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from deepinfer_offline.models.deepsig_v41.config import V41Config
from deepinfer_offline.models.deepsig_v41.weights import HyperWeights, LayerWeights, MoeWeights
from deepinfer_offline.ops import deepsig as ops
from deepinfer_offline.ops.cuda.support import kernels


@dataclass(frozen=True)
class Residual:
    """What passes from layer to layer.

    Attributes:
        streams: [T, S, d], model dtype.
        pre: float32 [T, S], the pre-mix made by the site before: it collapses the streams at the site after.
    """

    streams: Tensor
    pre: Tensor

    def take(self, rows: Tensor) -> Residual:
        return Residual(self.streams[rows], self.pre[rows])

    def collapse(self) -> Tensor:
        return ops.mhc_collapse(self.streams, self.pre)


def site(
    residual: Residual, hyper: HyperWeights, norm: Tensor, config: V41Config, sublayer: Callable[[Tensor], Tensor]
) -> Residual:
    """Run one sublayer: collapse with the carried pre-mix, normalise, compute, and mix the output back into the streams."""
    mix = ops.mhc_pre(
        residual.streams,
        hyper.fn,
        hyper.base,
        hyper.scale,
        iterations=config.hc_sinkhorn_iters,
        eps=config.hc_eps,
        norm_eps=config.rms_norm_eps,
    )
    output = sublayer(ops.rms_norm(residual.collapse(), norm, config.rms_norm_eps))
    return Residual(ops.mhc_post(output, residual.streams, mix.post, mix.comb), mix.pre)


def feed_forward(residual: Residual, layer: LayerWeights, config: V41Config, experts_per_token: int) -> Residual:
    """The expert site of a layer."""
    return site(
        residual, layer.hc_ffn, layer.ffn_norm, config, lambda x: mix_experts(x, layer.moe, config, experts_per_token)
    )


def mix_experts(x: Tensor, moe: MoeWeights, config: V41Config, experts_per_token: int) -> Tensor:
    """Routed experts plus the shared one: [T, d] to [T, d]."""
    ids, weights = ops.router(
        x,
        moe.gate,
        moe.bias,
        k=experts_per_token,
        normalise=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
    )
    grouped = ops.moe_experts if isinstance(moe.experts, ops.ExpertWeights) else kernels().moe_experts
    routed = grouped(x, ids, weights, moe.experts, limit=config.swiglu_limit)
    return routed + ops.shared_expert(x, moe.shared_gate_up, moe.shared_down, limit=config.swiglu_limit)


def add_engram(residual: Residual, layer: LayerWeights, rows: Tensor, config: V41Config) -> Residual:
    """Add the memory of table rows int64 [T, heads in all] to the streams."""
    engram = layer.engram
    assert engram is not None, "the layer has no Engram table"
    memory = ops.engram_gather(engram.table, engram.table_scale, rows, residual.streams.dtype)
    streams = ops.engram_update(
        residual.streams, memory, engram.wkv, engram.q_weight, engram.k_weight, eps=config.rms_norm_eps
    )
    return Residual(streams, residual.pre)
