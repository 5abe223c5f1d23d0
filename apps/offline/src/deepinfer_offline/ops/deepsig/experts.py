"""Clamped SwiGLU experts: one, and many grouped by expert. `v41-model` section 2.6."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer_offline.ops.deepsig.formats import dequantize_fp4_rows


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The routed experts of one layer, either dense or as stored in the checkpoint.

    Dense: `gate_up` float [E, 2m, d] (gate rows first), `down` float [E, d, m], no scales.
    FP4: `gate_up` int8 [E, 2m, d / 2], `down` int8 [E, d, m / 2], scales float8_e8m0fnu [E, rows, ceil(columns / 32)].
    """

    gate_up: Tensor
    down: Tensor
    gate_up_scale: Tensor | None = None
    down_scale: Tensor | None = None

    @property
    def count(self) -> int:
        return self.gate_up.shape[0]

    @property
    def nbytes(self) -> int:
        scales = [s for s in (self.gate_up_scale, self.down_scale) if s is not None]
        return sum(t.numel() * t.element_size() for t in (self.gate_up, self.down, *scales))

    def dense(self, expert: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(gate_up [2m, d], down [d, m]) of one expert in `dtype`; a view when they are dense already."""
        if self.gate_up_scale is None or self.down_scale is None:
            return self.gate_up[expert].to(dtype), self.down[expert].to(dtype)
        return (
            dequantize_fp4_rows(self.gate_up[expert], self.gate_up_scale[expert], dtype),
            dequantize_fp4_rows(self.down[expert], self.down_scale[expert], dtype),
        )


def clamped_swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clip(up, -limit, limit) in float32: [t, 2m] (gate first) to float32 [t, m]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return functional.silu(gate.clamp_max(limit)) * up.clamp(-limit, limit)


def shared_expert(x: Tensor, gate_up: Tensor, down: Tensor, *, limit: float) -> Tensor:
    """The expert that every token passes, weight 1: x [t, d], gate_up [2m, d], down [d, m] to [t, d], x's dtype."""
    return functional.linear(clamped_swiglu(functional.linear(x, gate_up), limit).to(x.dtype), down)


def moe_experts(x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertWeights, *, limit: float) -> Tensor:
    """The weighted sum of each token's experts.

    Tokens are sorted by expert; every expert that has tokens runs one GEMM pair over all of them.

    Args:
        x: float [t, d].
        ids: int64 [t, k], expert ids, distinct in a row.
        weights: float32 [t, k]; multiplied into the activation before the down projection.
        experts: the layer's experts.
        limit: `swiglu_limit`.

    Returns:
        [t, d] in x's dtype, summed over the k experts in float32.
    """
    k = ids.shape[1]
    order = ids.flatten().argsort(stable=True)
    rows = order // k
    counts = torch.bincount(ids.flatten(), minlength=experts.count).tolist()
    gathered, scales = x[rows], weights.flatten()[order].unsqueeze(-1)
    # Results go back to (token, k) order, so a token's sum does not depend on who else is in the batch.
    results = torch.empty(len(order), x.shape[1], dtype=torch.float32, device=x.device)
    start = 0
    for expert, count in enumerate(counts):
        if count == 0:
            continue
        part = slice(start, start + count)
        gate_up, down = experts.dense(expert, x.dtype)
        hidden = clamped_swiglu(functional.linear(gathered[part], gate_up), limit) * scales[part]
        results[order[part]] = functional.linear(hidden.to(x.dtype), down).float()
        start += count
    return results.view(-1, k, x.shape[1]).sum(dim=1).to(x.dtype)
