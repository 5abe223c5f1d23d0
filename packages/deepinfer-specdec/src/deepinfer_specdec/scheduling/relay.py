"""Confidences of past blocks, given to the budget only once they are old enough to say nothing about the current one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deepinfer_specdec.errors import SpecDecodeError

_NEVER = np.iinfo(np.int64).max  # the stamp of an empty entry: later than any step


class SurvivalRelay:
    """The last blocks' survivals of every slot, with the step in which they were drafted.

    Args:
        slots: rows that can run at the same time.
        width: columns of a draft.
        lag: a budget for step s uses blocks drafted at or before s - lag. 2 is what losslessness under asynchronous
            scheduling asks for (specdec page, A.4): the block that s verifies, drafted in s - 1, stays out.
    """

    def __init__(self, slots: int, width: int, lag: int = 2) -> None:
        if lag < 2:
            raise SpecDecodeError(f"lag {lag}; allowed: >= 2 steps, fresher confidences bias the output")
        self._lag = lag
        self._depth = lag + 1
        self._survivals = np.zeros((slots, self._depth, width), dtype=np.float32)
        self._stamps = np.full((slots, self._depth), _NEVER, dtype=np.int64)
        self._next = np.zeros(slots, dtype=np.int64)
        self._since = np.zeros(slots, dtype=np.int64)

    def reset(self, slot: int, since: int = 0) -> None:
        """A new sequence takes the slot: what the former one drafted counts no more, nor what comes later of steps before
        `since`.
        """
        self._stamps[slot] = _NEVER
        self._since[slot] = since

    def record(self, step: int, slots: NDArray[np.integer], survivals: NDArray[np.floating]) -> None:
        """Keep `survivals` [R, K] of the blocks that `slots` [R] drafted in `step`."""
        own = self._since[slots] <= step
        if not own.all():
            slots, survivals = slots[own], survivals[own]
        at = self._next[slots]
        self._survivals[slots, at, : survivals.shape[1]] = survivals
        self._survivals[slots, at, survivals.shape[1] :] = 0.0
        self._stamps[slots, at] = step
        self._next[slots] = (at + 1) % self._depth

    def forecast(self, step: int, slots: NDArray[np.integer]) -> NDArray[np.float32]:
        """Survivals float32 [R, K] that stand for the blocks of `slots` which `step` verifies: those of each row's newest block
        that is old enough, and 1 for a row without one (the paper's production rule, section 5.2). Changes nothing.
        """
        rows = slots.shape[0]
        back = (self._next[slots, None] - 1 - np.arange(self._depth)) % self._depth  # newest first
        stamps = self._stamps[slots[:, None], back]
        old = stamps <= step - self._lag
        newest = old.argmax(axis=1)
        survivals = self._survivals[slots, back[np.arange(rows), newest]]
        survivals[~old.any(axis=1)] = 1.0
        return survivals
