"""Clamped SwiGLU experts: one, and many grouped by expert. `v41-model` section 2.6."""

from __future__ import annotations

from collections.abc import Callable
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

    def gate_up_of(self, expert: int, dtype: torch.dtype) -> Tensor:
        """[2m, d] of one expert in `dtype`; a view when dense."""
        return _dense(self.gate_up[expert], self.gate_up_scale, expert, dtype)

    def down_of(self, expert: int, dtype: torch.dtype) -> Tensor:
        """[d, m] of one expert in `dtype`; a view when dense."""
        return _dense(self.down[expert], self.down_scale, expert, dtype)


def _dense(codes: Tensor, scales: Tensor | None, expert: int, dtype: torch.dtype) -> Tensor:
    return codes.to(dtype) if scales is None else dequantize_fp4_rows(codes, scales[expert], dtype)


def clamped_swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clip(up, -limit, limit) in float32: [t, 2m] (gate first) to float32 [t, m]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return functional.silu(gate.clamp_max(limit), inplace=True).mul_(up.clamp(-limit, limit))


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
    k, d = ids.shape[1], x.shape[1]
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=experts.count).tolist()
    gathered = x.index_select(0, order // k)
    parts = [(expert, count) for expert, count in enumerate(counts) if count]
    gate_up = gathered.new_empty(len(order), experts.gate_up.shape[1])
    _grouped(gathered, gate_up, parts, lambda expert: experts.gate_up_of(expert, x.dtype))
    hidden = clamped_swiglu(gate_up, limit).mul_(weights.flatten()[order].unsqueeze(-1))
    down = _grouped(hidden.to(x.dtype), gathered, parts, lambda expert: experts.down_of(expert, x.dtype))
    # Back to (token, k) order: a token's sum does not depend on who else is in the batch.
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return down.index_select(0, place).view(-1, k, d).sum(dim=1, dtype=torch.float32).to(x.dtype)


def _grouped(x: Tensor, out: Tensor, parts: list[tuple[int, int]], weight: Callable[[int], Tensor]) -> Tensor:
    """Multiply consecutive row groups of x by their expert's weight [n, k]; writes and returns `out` [rows, n]."""
    start = 0
    for expert, count in parts:
        torch.mm(x[start : start + count], weight(expert).t(), out=out[start : start + count])
        start += count
    return out
