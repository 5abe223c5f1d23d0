"""Confidences of past blocks, given to the budget only once they are old enough to say nothing about the current one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer_specdec.errors import SpecDecodeError

_NEVER = np.iinfo(np.int64).max  # the stamp of an empty entry: later than any step
_TARGET_SAMPLES = 1800  # survivals looked at per step: more blocks a row when rows are few
_JOB_MEMORY = 4000.0  # blocks that the job's mean remembers
_LEVEL_RATE = 1.0 / 12.0  # weight of one block in a row's level, once it has seen this many
_LEVEL_PRIOR = 3.0  # blocks that the job's mean is worth against a row's own
_JOB_PRIOR = 8.0  # blocks that optimism is worth against what the job has shown
_RECENT = 512  # blocks of the job to stand in for rows that nothing fresh is known about
_BLOCK_HALF_LIFE = 3.0  # blocks
_GOLDEN, _SILVER = 0.6180339887498949, 0.4142135623730951
_MEAN_WEIGHT = 4.0  # blocks that the job's mean is worth in a forecast


@dataclass(frozen=True, slots=True)
class Forecast:
    """What R rows may draft, from old blocks.

    Attributes:
        survivals: float32 [R, D * K], of D old blocks a row.
        weights: float32 [R, D * K]; a row's sum to 1 per column, so weighted sums are expected tokens per block.
        levels: float32 [R], expected accepted drafts of each row.
        past_levels: float32 [R], the levels as they were when the blocks in `survivals` were planned. Rows are picked by
            `levels`; what picking is worth is judged with `past_levels`, or rows that were lucky once would be believed.
    """

    survivals: NDArray[np.float32]
    weights: NDArray[np.float32]
    levels: NDArray[np.float32]
    past_levels: NDArray[np.float32]


class SurvivalRelay:
    """The last blocks' survivals of every slot, with the step in which they were drafted.

    One block is a noisy forecast of the next, so few rows draw on several past blocks each; with many rows one is enough.

    Args:
        slots: rows that can run at the same time.
        width: columns of a draft.
        depth: blocks kept per slot.
        lag: a budget for step s uses blocks drafted at or before s - lag. 2 is what losslessness under asynchronous
            scheduling asks for (specdec page, A.4): the current block, and the one whose outcome is not yet known, stay out.
    """

    def __init__(self, slots: int, width: int, depth: int = 16, lag: int = 2) -> None:
        if lag < 2:
            raise SpecDecodeError(f"lag {lag}; allowed: >= 2 steps, fresher confidences bias the output")
        if depth < 1:
            raise SpecDecodeError(f"depth {depth}; allowed: >= 1 block")
        self._lag = lag
        self._width = width
        self._depth = depth + lag
        self._survivals = np.zeros((slots, self._depth, width), dtype=np.float32)
        self._stamps = np.full((slots, self._depth), _NEVER, dtype=np.int64)
        self._next = np.zeros(slots, dtype=np.int64)
        self._levels = np.zeros((slots, lag + 1), dtype=np.float32)  # now, one block ago, ...
        self._blocks = np.zeros(slots, dtype=np.float32)  # folded into the level
        self._mean = np.ones(width, dtype=np.float32)  # of the job so far; optimistic until something is known
        self._seen = _JOB_PRIOR
        self._recent = np.zeros((_RECENT, width), dtype=np.float32)  # blocks of the job, newest over oldest
        self._written = 0
        self._kept = 0

    def record(self, step: int, slots: NDArray[np.integer], survivals: NDArray[np.floating]) -> None:
        """Keep `survivals` [R, K] of the blocks that `slots` [R] drafted in `step`."""
        self._fold(slots)
        at = self._next[slots]
        self._survivals[slots, at, : survivals.shape[1]] = survivals
        self._survivals[slots, at, survivals.shape[1] :] = 0.0
        self._stamps[slots, at] = step
        self._next[slots] = (at + 1) % self._depth

    def reset(self, slot: int) -> None:
        """A new sequence takes the slot: what the former one drafted no longer counts."""
        self._stamps[slot] = _NEVER
        self._blocks[slot] = 0.0

    def forecast(self, step: int, slots: NDArray[np.integer], half_life: float = np.inf) -> Forecast:
        """What the rows of `slots` may draft in `step`. Changes nothing.

        A row whose newest old block lies `half_life` steps back counts with odds of one half as any row of the job; one without
        any does so surely. When nothing is known yet, survival is 1.
        """
        rows = slots.shape[0]
        depth = int(np.clip(_TARGET_SAMPLES // max(1, rows * self._width), 1, self._depth - self._lag))
        newest = self._stamps[slots[:, None], (self._next[slots, None] - 1 - np.arange(self._lag)) % self._depth]
        skip = np.cumprod(newest > step - self._lag, axis=1).sum(axis=1)  # blocks too fresh, before the first old one
        back = (self._next[slots] - 1 - skip)[:, None] - np.arange(depth)  # newest usable first
        at = slots[:, None], back % self._depth
        stamps = self._stamps[at]
        chosen = stamps <= step - self._lag
        survivals = self._survivals[at]
        known = chosen.any(axis=1)
        fading = chosen * np.exp2(-np.arange(chosen.shape[1]) / _BLOCK_HALF_LIFE)
        weights = (fading / np.maximum(fading.sum(axis=1), 1e-9)[:, None]).astype(np.float32)
        weights[~known, 0] = 1.0
        age = np.where(known, step - self._lag - np.where(chosen, stamps, -1).max(axis=1), 0)
        trust = np.exp2(-age / half_life).astype(np.float32)
        self._replace_stale(survivals, np.where(known, trust, 0.0), step)
        own = trust * self._blocks[slots] / (self._blocks[slots] + _LEVEL_PRIOR)
        levels = own[:, None] * self._levels[slots] + (1.0 - own[:, None]) * self._mean.sum()
        survivals, weights = self._with_mean(survivals, weights, float(chosen.sum()))
        wide = np.broadcast_to(weights[..., None], survivals.shape)
        return Forecast(survivals.reshape(rows, -1), wide.reshape(rows, -1), levels[:, 0], levels[:, -1])

    def _replace_stale(self, survivals: NDArray[np.float32], trust: NDArray[np.float32], step: int) -> None:
        """Give rows that are not trusted a block of the job's recent ones, whole: an average would hide how much blocks differ,
        and a top-K lives off that. Which rows and blocks is left to a low-discrepancy sequence of the step.
        """
        stale = np.flatnonzero((np.arange(trust.size) * _GOLDEN + step * _SILVER) % 1.0 >= trust)
        if not stale.size:
            return
        if self._kept:
            survivals[stale] = self._recent[(stale + step) % self._kept][:, None]
        else:
            survivals[stale] = self._mean

    def _with_mean(
        self, survivals: NDArray[np.float32], weights: NDArray[np.float32], blocks: float
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Let the job's mean weigh as much as a few blocks: one bad block of one row is no reason to stop."""
        share = np.float32(_MEAN_WEIGHT / (_MEAN_WEIGHT + blocks))
        if share < 0.05:
            return survivals, weights
        rows = survivals.shape[0]
        mean = np.broadcast_to(self._mean, (rows, 1, self._width))
        added = np.full((rows, 1), share, dtype=np.float32)
        return np.concatenate([survivals, mean], axis=1), np.concatenate([weights * (1.0 - share), added], axis=1)

    def _fold(self, slots: NDArray[np.integer]) -> None:
        """Take the blocks that a forecast may now look at into the rows' levels and the job's mean."""
        at = (self._next[slots] - self._lag + 1) % self._depth
        full = self._stamps[slots, at] != _NEVER
        folded = slots[full]
        if not folded.size:
            return
        survivals = self._survivals[folded, at[full]]
        self._blocks[folded] += 1.0
        rate = np.maximum(_LEVEL_RATE, 1.0 / self._blocks[folded])
        former = self._levels[folded]
        newest = former[:, :1] + rate[:, None] * (survivals.sum(axis=1, keepdims=True) - former[:, :1])
        self._levels[folded] = np.concatenate([newest, former[:, :-1]], axis=1)
        at = (self._written + np.arange(folded.size)) % _RECENT
        self._recent[at] = survivals
        self._written += folded.size
        self._kept = min(_RECENT, self._written)
        self._seen = min(_JOB_MEMORY, self._seen + folded.size)
        self._mean += (survivals.mean(axis=0) - self._mean) * np.float32(min(1.0, folded.size / self._seen))
