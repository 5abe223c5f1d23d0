"""Confidences of past blocks, handed to the budget only once they are old enough to say nothing about the current one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deepinfer_specdec.errors import SpecDecodeError

_NEVER = np.iinfo(np.int64).max  # the stamp of an empty entry: later than any step
_TARGET_SAMPLES = 2048  # survivals looked at per step: more blocks a row when rows are few


class SurvivalRelay:
    """The last blocks' survivals of every slot, with the step in which they were drafted.

    One block is a noisy forecast of the next, so few rows draw on several past blocks each; with many rows one is
    enough.

    Args:
        slots: rows that can run at the same time.
        width: columns of a draft.
        depth: blocks kept per slot.
        lag: a budget for step s uses blocks drafted at or before s - lag. 2 is what losslessness under asynchronous
            scheduling asks for (specdec page, A.4): the current block, and the one whose outcome is not yet known, stay
            out.
    """

    def __init__(self, slots: int, width: int, depth: int = 16, lag: int = 2) -> None:
        if lag < 2:
            raise SpecDecodeError(f"lag {lag}; allowed: >= 2 steps, fresher confidences bias the output")
        self._lag = lag
        self._width = width
        self._depth = depth + lag
        self._survivals = np.zeros((slots, self._depth, width), dtype=np.float32)
        self._stamps = np.full((slots, self._depth), _NEVER, dtype=np.int64)
        self._next = np.zeros(slots, dtype=np.int64)

    def record(self, step: int, slots: NDArray[np.integer], survivals: NDArray[np.floating]) -> None:
        """Keep `survivals` [R, K] of the blocks that `slots` [R] drafted in `step`."""
        at = self._next[slots]
        self._survivals[slots, at, : survivals.shape[1]] = survivals
        self._survivals[slots, at, survivals.shape[1] :] = 0.0
        self._stamps[slots, at] = step
        self._next[slots] = (at + 1) % self._depth

    def reset(self, slot: int) -> None:
        """A new sequence takes the slot: what the former one drafted no longer counts."""
        self._stamps[slot] = _NEVER
        self._next[slot] = 0

    def forecast(self, step: int, slots: NDArray[np.integer]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Survivals and weights, both float32 [R, D * K]: what the rows of `slots` may draft in `step`.

        A row's weights over its D blocks sum to 1 per column, so a weighted sum over everything is an expected number
        of tokens. A slot without an old enough block gets the mean of the others, or survival 1 when there are none.
        """
        rows = slots.shape[0]
        depth = int(np.clip(_TARGET_SAMPLES // max(1, rows * self._width), 1, self._depth - self._lag))
        back = (self._next[slots, None] - 1 - np.arange(depth + self._lag)) % self._depth  # newest first
        stamps = np.take_along_axis(self._stamps[slots], back, axis=1)
        old = stamps <= step - self._lag
        chosen = old & (np.cumsum(old, axis=1) <= depth)
        survivals = self._survivals[slots[:, None], back]
        known = chosen.sum(axis=1)
        weights = chosen / np.maximum(known, 1)[:, None]
        if not known.all():
            mean = (
                np.ones(self._width)
                if not known.any()
                else (survivals * weights[..., None]).sum(axis=(0, 1)) / (known > 0).sum()
            )
            survivals[known == 0, 0] = mean
            weights[known == 0, 0] = 1.0
        wide = np.broadcast_to(weights[..., None], survivals.shape).reshape(rows, -1)
        return survivals.reshape(rows, -1), wide.astype(np.float32)
