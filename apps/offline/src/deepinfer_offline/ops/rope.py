"""Rotary position embedding: frequencies of the scaling schemes, tables, and the rotation itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions become angles.

    Attributes:
        head_dim: rotated channels of a head, even.
        theta: base of the frequencies, theta^(-2k / head_dim).
        kind: one of `ROPE_TYPES`.
        factor: how many times longer than trained (linear, llama3, yarn).
        original_positions: trained length (llama3, yarn).
        low_freq_factor, high_freq_factor: llama3: waves longer than original / low are stretched in full, shorter
            than original / high not at all.
        beta_fast, beta_slow: yarn: rotations over the trained length between which the stretching fades in.
        attention_factor: yarn: scale of cos and sin; 0 takes 0.1 ln(factor) + 1.
        divisors: per-frequency divisors given by the checkpoint [head_dim / 2]; they replace the scheme.
    """

    head_dim: int
    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0
    divisors: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if self.kind not in ROPE_TYPES:
            raise ValueError(f"rope type {self.kind!r} is not one of {', '.join(ROPE_TYPES)}")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"rotary head_dim {self.head_dim} must be even and at least 2")
        if self.kind in ("llama3", "yarn") and self.original_positions < 1:
            raise ValueError(f"rope type {self.kind!r} needs original_max_position_embeddings")
        if self.theta <= 1 or self.factor <= 0:
            raise ValueError(f"rope_theta {self.theta} must be above 1 and factor {self.factor} above 0")
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor {self.low_freq_factor} must be above 0 and below high_freq_factor {self.high_freq_factor}"
            )
        if self.kind == "yarn" and not 0 < self.beta_slow < self.beta_fast:
            raise ValueError(f"beta_slow {self.beta_slow} must be above 0 and below beta_fast {self.beta_fast}")


def rope_frequencies(config: RopeConfig) -> torch.Tensor:
    """Angles per position, float32 [head_dim / 2]."""
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.theta**steps
    if config.divisors is not None:
        return frequencies / torch.tensor(config.divisors, dtype=torch.float32)
    if config.kind == "linear":
        return frequencies / config.factor
    if config.kind == "llama3":
        return _llama3(frequencies, config)
    if config.kind == "yarn":
        return _yarn(frequencies, config)
    return frequencies


def rope_scale(config: RopeConfig) -> float:
    """What cos and sin are multiplied with (YaRN's attention factor; 1 for the other schemes)."""
    if config.kind != "yarn":
        return 1.0
    if config.attention_factor > 0:
        return config.attention_factor
    return 0.1 * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0


def rope_table(config: RopeConfig, positions: int, device: str) -> torch.Tensor:
    """cos and sin of every position, float32 [positions, 2, head_dim / 2]."""
    frequencies = rope_frequencies(config)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    scale = rope_scale(config)
    return torch.stack([angles.cos() * scale, angles.sin() * scale], dim=1).to(device)


def apply_rope(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate channel pairs (k, k + head_dim / 2), in float32.

    Args:
        x: [T, heads, head_dim].
        table: float32 [T, 2, head_dim / 2], rows of `rope_table` at the tokens' positions.

    Returns:
        The shape and dtype of `x`.
    """
    cos, sin = table[:, None, 0], table[:, None, 1]
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def _llama3(frequencies: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    rotations = config.original_positions * frequencies / (2 * math.pi)  # over the trained length
    low, high = config.low_freq_factor, config.high_freq_factor
    smooth = ((rotations - low) / (high - low)).clamp(0, 1)  # 0: stretched in full, 1: not at all
    return frequencies * ((1 - smooth) / config.factor + smooth)


def _yarn(frequencies: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    def channel(rotations: float) -> float:
        """Fractional channel pair that makes so many rotations over the trained length."""
        length = config.original_positions / (rotations * 2 * math.pi)
        return config.head_dim * math.log(length) / (2 * math.log(config.theta))

    low = max(math.floor(channel(config.beta_fast)), 0)
    high = min(math.ceil(channel(config.beta_slow)), config.head_dim - 1)
    ramp = ((torch.arange(config.head_dim // 2) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return frequencies * (ramp / config.factor + (1 - ramp))
