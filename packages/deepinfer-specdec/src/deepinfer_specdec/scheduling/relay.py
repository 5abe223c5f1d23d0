"""Confidences of past blocks, given to the budget only once they are old enough to say nothing about the current one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deepinfer_specdec.errors import SpecDecodeError

_NEVER = np.iinfo(np.int64).max  # the stamp of an empty entry: later than any step
_BLOCKS = 6  # that make a forecast where rows are few
_FIRSTS = 32  # first blocks of rows that stand for the next row's first


class SurvivalRelay:
    """The last blocks' survivals of every slot, with the step in which they were drafted.

    The newest block of a row that is old enough stands for the one to come, as in the paper's production rule (section
    5.2). One to three rows' blocks are too few to go by: those of a row are averaged then, so that about six make a forecast.
    (Where the blocks of one row have nothing to do with each other this makes 11 % more tokens a second in the simulator, and
    at most 0.04 % less in any other load.)

    A row without any such block is taken to be as three quarters of the last rows' first blocks were at most: not as their mean,
    since the drafts to verify are picked by live confidences, and so room for a good row costs little. The paper counts such a
    row as certain, which here only the first ones do; answers of three steps with poor drafts then run at 0.80 to 0.98 of
    this rule's speed in the simulator, and no others at more than 1.004.

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
        self._depth = lag + _BLOCKS
        self._survivals = np.zeros((slots, self._depth, width), dtype=np.float32)
        self._stamps = np.full((slots, self._depth), _NEVER, dtype=np.int64)
        self._next = np.zeros(slots, dtype=np.int64)
        self._since = np.zeros(slots, dtype=np.int64)
        self._begins = np.ones(slots, dtype=bool)  # no block of the slot's sequence was recorded yet
        self._firsts = np.zeros((_FIRSTS, width), dtype=np.float32)
        self._first_stamps = np.full(_FIRSTS, _NEVER, dtype=np.int64)
        self._next_first = 0

    def reset(self, slot: int, since: int = 0) -> None:
        """A new sequence takes the slot: what the former one drafted counts no more, nor what comes later of steps before
        `since`.
        """
        self._stamps[slot] = _NEVER
        self._since[slot] = since
        self._begins[slot] = True

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
        first = self._begins[slots]
        if first.any():
            self._keep_firsts(step, self._survivals[slots[first], at[first]])
            self._begins[slots] = False

    def forecast(self, step: int, slots: NDArray[np.integer]) -> NDArray[np.float32]:
        """Survivals float32 [R, K] that stand for the blocks of `slots` which `step` verifies. Changes nothing."""
        rows = slots.shape[0]
        back = (self._next[slots, None] - 1 - np.arange(self._depth)) % self._depth  # newest first
        old = self._stamps[slots[:, None], back] <= step - self._lag
        some = old.any(axis=1)
        most = _BLOCKS // max(1, rows)
        if most > 1:
            chosen = old & (np.cumsum(old, axis=1) <= most)
            sums = (self._survivals[slots[:, None], back] * chosen[..., None]).sum(axis=1)
            survivals = sums / np.maximum(1, chosen.sum(axis=1, keepdims=True)).astype(np.float32)
        else:
            survivals = self._survivals[slots, back[np.arange(rows), old.argmax(axis=1)]]
        if not some.all():
            survivals[~some] = self._beginning(step)
        return survivals

    def _keep_firsts(self, step: int, blocks: NDArray[np.float32]) -> None:
        at = (self._next_first + np.arange(len(blocks))) % _FIRSTS
        self._firsts[at], self._first_stamps[at] = blocks, step
        self._next_first = (self._next_first + len(blocks)) % _FIRSTS

    def _beginning(self, step: int) -> NDArray[np.float32]:
        """float32 [K], of a row that has no block old enough for `step`: upper quartiles; ones before any row had one."""
        firsts = self._firsts[self._first_stamps <= step - self._lag]
        return np.sort(firsts, axis=0)[3 * len(firsts) // 4] if len(firsts) else np.ones(firsts.shape[1], np.float32)
