"""The best budget over the current block and what it admits, in one sort: for synchronous loops, where both are needed between
two steps and nothing hides what they take.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from deepinfer_specdec.scheduling.admission import admit


@dataclass(frozen=True, slots=True)
class Choice:
    """What a step verifies.

    Attributes:
        lengths: int32 [R], drafts of each row.
        budget: their sum.
        gain: rate that is expected over the rate without drafts; 1 without a budget.
    """

    lengths: NDArray[np.int32]
    budget: int
    gain: float


def round_sizes(tokens: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Which sizes of a step, in tokens, are round: all to 8, every fourth to 16, every eighth to 64, every 16th above.

    A size that never ran makes kernels be built (5 to 20 ms on a CPU) or a graph be captured, and its price is learned by
    itself: few sizes, often.
    """
    return (
        (tokens <= 8) | ((tokens % 4 == 0) & (tokens <= 16)) | ((tokens % 8 == 0) & (tokens <= 64)) | (tokens % 16 == 0)
    )


def choose(
    values: NDArray[np.floating],
    counts: NDArray[np.integer],
    seconds: NDArray[np.float64],
    edge: float = 0.0,
    sizes: Callable[[NDArray[np.integer]], NDArray[np.bool_]] | None = None,
) -> Choice:
    """As `live_budget` and `admit` do (read the warning there): the budget of the best rate over all, (rows + values of the
    admitted drafts) / seconds, spent on the highest values.

    Args:
        values: [R, K], non-increasing along rows, 0 past the counts: survivals, or survivals times a worth of each row.
        counts: [R], drafts that exist.
        seconds: float64 [n + 1], of the step with 0..n drafts, n at least the sum of `counts`.
        edge: share by which a budget above 0 must beat none.
        sizes: which sizes of the step, rows and drafts together, may be chosen, always the same; None for all.
    """
    rows, available = values.shape[0], int(counts.sum())
    if not available:
        return Choice(np.zeros(rows, np.int32), 0, 1.0)
    ranked = np.sort(values, axis=None)[: -available - 1 : -1]
    rates = (rows + np.cumsum(ranked, dtype=np.float64)) / seconds[1 : available + 1]
    if sizes is not None:
        rates = np.where(_allowed(sizes, rows, available), rates, 0.0)
    best = int(rates.argmax())
    gain = float(rates[best]) * float(seconds[0]) / rows
    if gain <= 1.0 + edge:
        return Choice(np.zeros(rows, np.int32), 0, 1.0)
    budget = best + 1
    lengths = np.minimum((values >= ranked[best]).sum(axis=1), counts).astype(np.int32)
    if int(lengths.sum()) != budget:  # a tie at the edge: the rule of `admit`
        lengths = admit(values, counts, budget)
    return Choice(lengths, budget, gain)


@lru_cache(maxsize=64)
def _allowed(sizes: Callable[[NDArray[np.integer]], NDArray[np.bool_]], rows: int, drafts: int) -> NDArray[np.bool_]:
    """bool [drafts]: whether a step of these rows may verify 1, 2, ... drafts."""
    return sizes(np.arange(rows + 1, rows + drafts + 1))
