"""Experts and microscaled linear layers in plain torch."""

from __future__ import annotations

import torch

from ..weights import MxWeights
from . import quant


def dense_weights(weights: MxWeights, expert: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Natural weights of one expert, dequantised [rows, columns]."""
    codes, scales = weights.codes[expert], quant.e8m0_to_float(weights.scales[expert]).to(dtype)
    values = quant.decode_e2m1(quant.unpack_nibbles(codes)) if weights.fp4 else codes.view(torch.float8_e4m3fn).float()
    return values.to(dtype) * scales.repeat_interleave(32, 1)[:, : weights.columns]


def mx_linear(x: torch.Tensor, weights: MxWeights, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """x [t, K] times the first matrix, transposed: [t, N]."""
    return x.to(dtype) @ dense_weights(weights, 0, dtype).T


def moe_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: MxWeights,
    down: MxWeights,
    *,
    limit: float,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Weighted sum of each token's experts; ids [t, k] with -1 for padding. The activation is rounded to x's dtype."""
    out = torch.zeros(x.shape[0], down.rows, dtype=dtype, device=x.device)
    for expert in ids.unique().tolist():
        if expert < 0:
            continue
        token, column = (ids == expert).nonzero(as_tuple=True)
        both = (x[token].to(dtype) @ dense_weights(gate_up, expert, dtype).T).to(x.dtype).to(dtype)
        gate, up = both.chunk(2, -1)
        hidden = torch.nn.functional.silu(gate.clamp_max(limit)) * up.clamp(-limit, limit)
        hidden = (hidden * weights[token, column].to(dtype)[:, None]).to(x.dtype).to(dtype)
        out.index_add_(0, token, hidden @ dense_weights(down, expert, dtype).T)
    return out
