"""Pooling of r consecutive tokens into one compressed latent. `v41-model` section 2.4."""

from __future__ import annotations

from torch import Tensor


def compress(values: Tensor, gates: Tensor) -> Tensor:
    """Pool each group of tokens, every channel with its own softmax over the group.

    Args:
        values: float32 [g, r, n], projected tokens of g complete groups.
        gates: float32 [g, r, n].

    Returns:
        float32 [g, n], before normalisation and rotary embedding.
    """
    return (gates.softmax(dim=1) * values).sum(dim=1)
