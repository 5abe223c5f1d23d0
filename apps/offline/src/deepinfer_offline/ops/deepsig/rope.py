"""Rotary embedding on the last channels, adjacent pairs, with the frequency-only YaRN of compressed layers."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class RotaryTable(NamedTuple):
    """Rotation of some positions: cosines and sines, float32 [t, pairs], and both as one complex64 tensor."""

    cos: Tensor
    sin: Tensor
    turn: Tensor


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
    cos, sin = angles.cos(), angles.sin()
    return RotaryTable(cos, sin, torch.complex(cos, sin))


def apply_rope(x: Tensor, table: RotaryTable, *, inverse: bool = False, inplace: bool = False) -> Tensor:
    """Rotate the last `2 * pairs` channels, pair (2k, 2k + 1) as one complex number, in float32.

    Args:
        x: float [t, n] or [t, heads, n].
        table: of the t positions, [t, pairs].
        inverse: rotate back.
        inplace: x may be overwritten; it is when it is float32.

    Returns:
        The rotated tensor, x's shape and dtype.
    """
    turn = table.turn.conj() if inverse else table.turn
    if x.dim() == 3:
        turn = turn.unsqueeze(1)
    width = 2 * turn.shape[-1]
    start = x.shape[-1] - width
    if x.dtype != torch.float32 or start % 2:
        return torch.cat((x[..., :start], _rotated(x[..., start:].float(), turn).to(x.dtype)), dim=-1)
    out = x if inplace and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
    torch.view_as_complex(out[..., start:].unflatten(-1, (-1, 2))).mul_(turn)
    return out


def _rotated(tail: Tensor, turn: Tensor) -> Tensor:
    pairs = torch.view_as_complex(tail.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turn).flatten(-2)
