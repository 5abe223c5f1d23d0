"""What a draft is worth: which tokens bring the end of the work nearer, and when no draft can pay."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_SPREAD = 0.2  # of the longest way to go: rows this far behind it are e times less likely to end last
_STEPS = 2.0


def token_worth(finish: NDArray[np.floating], fixed_share: float) -> NDArray[np.float64]:
    """What an accepted draft of each row saves, relative to a step's time divided by its rows; float64 [R], mean 1.

    For rows that nobody waits for. A row that ends a step sooner saves its own part of a step. The fixed part is saved only
    if the last row ends sooner, so it belongs to the rows that are likely to be it. (Where others wait for the rows' places
    every row is worth the same: 1.)

    Args:
        finish: [R], steps until each row ends as far as is known.
        fixed_share: share of a step's time that does not depend on its rows, 0..1.
    """
    if not finish.size:
        return np.zeros(0)
    longest = float(finish.max())
    last = np.exp((finish - longest) / (_STEPS + _SPREAD * longest))
    return (1.0 - fixed_share) + fixed_share * finish.size * last / last.sum()


def worthless_below(rows: int, seconds: NDArray[np.float64]) -> float:
    """Survival below which drafts are not worth their time.

    Plain decoding gives rows / seconds[0] tokens a second. The drafts of any budget that beats it survive on average at
    least as often as drafts must that are added at the cheapest average rate the curve has anywhere. Half of that is the
    floor: curves are measured, and a kink may make single drafts cheaper than the average.

    Args:
        rows: sequences in the step.
        seconds: float64 [n + 1], of the step with 0..n drafts.
    """
    if seconds.size < 2 or not seconds[0] > 0.0:
        return 0.0
    cheapest = float(((seconds[1:] - seconds[0]) / np.arange(1, seconds.size)).min())
    return min(1.0, 0.5 * rows * max(0.0, cheapest) / float(seconds[0]))


def scaled_tokens(tokens: NDArray[np.float64], rows: int, of: int) -> NDArray[np.float64]:
    """float64 [n + 1]: expected accepted drafts over `of` sequences from those (`expected_tokens`) over `rows` sampled ones."""
    factor = of / rows
    most = int((tokens.size - 1) * factor)
    return factor * np.interp(np.arange(most + 1) / factor, np.arange(tokens.size), tokens)
