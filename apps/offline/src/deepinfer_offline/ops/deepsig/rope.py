"""Rotary embedding on the last channels, adjacent pairs, with the frequency-only YaRN of compressed layers."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class RotaryTable(NamedTuple):
    """Rotation of some positions: float32 cosines and sines, [..., pairs]."""

    cos: Tensor
    sin: Tensor


def rope_frequencies(
    dim: int,
    theta: float,
    *,
    factor: float = 1.0,
    original_length: int = 0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
) -> Tensor:
    """Angular frequency of each channel pair, float32 [dim / 2].

    Args:
        dim: rotated channels, even.
        theta: base of the geometric progression.
        factor: YaRN divisor of the slow frequencies.
        original_length: context length before the extension; 0 switches YaRN off.
        beta_fast: rotations over the original length above which a frequency is kept.
        beta_slow: rotations below which it is divided by `factor`.
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    frequencies = 1.0 / (theta**exponents)
    if original_length <= 0:
        return frequencies

    def channel(rotations: float) -> float:
        return dim * math.log(original_length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(channel(beta_fast)), 0)
    high = min(math.ceil(channel(beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return frequencies / factor * ramp + frequencies * (1 - ramp)


def rotary_table(positions: Tensor, frequencies: Tensor) -> RotaryTable:
    """Cosines and sines of `positions` [...] (integers) under `frequencies` [pairs]; float32 [..., pairs]."""
    angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
    return RotaryTable(angles.cos(), angles.sin())


def apply_rope(x: Tensor, table: RotaryTable, *, inverse: bool = False) -> Tensor:
    """Rotate the last `2 * pairs` channels, pair (2k, 2k + 1) as one complex number, in float32.

    Args:
        x: float [t, n] or [t, heads, n].
        table: of the t positions, [t, pairs].
        inverse: rotate back.

    Returns:
        A new tensor of x's shape and dtype.
    """
    cos, sin = (table.cos, table.sin) if x.dim() == 2 else (table.cos.unsqueeze(1), table.sin.unsqueeze(1))
    if inverse:
        sin = -sin
    width = 2 * cos.shape[-1]
    out = x.clone()
    tail = x[..., x.shape[-1] - width :].float().unflatten(-1, (-1, 2))
    real, imag = tail.unbind(-1)
    rotated = torch.stack((real * cos - imag * sin, real * sin + imag * cos), dim=-1)
    out[..., x.shape[-1] - width :] = rotated.flatten(-2).to(x.dtype)
    return out
