"""Where verification's decisions come from: counter-based numbers in production, exhaustive branches in exact tests."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from deepinfer_specdec.verification import randomness


class Chance(Protocol):
    """Decides yes or no with a probability, and draws an index with weights, once per (position, stream)."""

    def accept(self, probability: float, position: int, anchor: int = 0, stream: int = randomness.ACCEPT) -> bool: ...

    def draw(
        self, weights: NDArray[np.floating], position: int, anchor: int = 0, stream: int = randomness.TARGET
    ) -> int: ...


def inverse_cdf(weights: NDArray[np.floating], u: float) -> int:
    """Index drawn by `u` in [0, 1) from non-negative `weights` [V] (any positive total), in index order.

    An index of weight zero is never returned: `side="right"` steps over equal cumulative sums, and the cap at the last
    positive weight absorbs the rounding of `u * total`.
    """
    cumulative = np.cumsum(weights, dtype=np.float64)
    index = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    return min(index, int(np.searchsorted(cumulative, cumulative[-1], side="left")))


class CounterChance:
    """Decisions for one sequence from its seed; the same (position, stream, anchor) always decides the same way."""

    def __init__(self, seed: int) -> None:
        self._seed = np.uint64(seed & 0xFFFFFFFFFFFFFFFF)

    def accept(self, probability: float, position: int, anchor: int = 0, stream: int = randomness.ACCEPT) -> bool:
        return float(randomness.uniform(self._seed, position, stream, anchor)) < probability

    def draw(
        self, weights: NDArray[np.floating], position: int, anchor: int = 0, stream: int = randomness.TARGET
    ) -> int:
        return inverse_cdf(weights, float(randomness.uniform(self._seed, position, stream, anchor)))
