"""What survivals have been worth lately: drafts that were kept against those that were to be kept."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_EDGES = (0.15, 0.3, 0.6)  # survivals are corrected in four ranges
_PRIOR = 2.0  # drafts in a range that say the survivals are right
_FADE = 0.01  # share of the way back to the prior per step
_MOST = 1.2


class Hopes:
    """Corrects survivals by the fate of the drafts that were verified.

    However well survivals fit all drafts, those that are verified were chosen because they look high, so they err upwards, small
    ones most: a small chance is taken only where it looks larger than others, or the row's tokens are worth most. So each
    range of survivals has a factor of its own, and drafts count by their worth. Nothing is forgotten at once and nothing lasts:
    what was seen fades with every step, whether it verified drafts or not.
    """

    def __init__(self) -> None:
        self._hoped = np.full(len(_EDGES) + 1, _PRIOR)
        self._kept = self._hoped.copy()

    def believed(self, survivals: NDArray[np.floating]) -> NDArray[np.float64]:
        """float64 [R, K], what survivals [R, K] are worth; never growing along a row."""
        factors = np.minimum(_MOST, self._kept / self._hoped)
        corrected = np.minimum(1.0, survivals * factors.take(_ranges(survivals)))
        for column in range(1, corrected.shape[1]):
            np.minimum(corrected[:, column], corrected[:, column - 1], out=corrected[:, column])
        return corrected

    def settle(
        self,
        survivals: NDArray[np.floating],
        worth: NDArray[np.floating],
        verified: NDArray[np.integer],
        kept: NDArray[np.integer],
    ) -> None:
        """A step verified drafts.

        Args:
            survivals: [R, K], as the drafter gave them.
            worth: [R], of a token of each row.
            verified: [R], drafts of each row that were verified.
            kept: [R], those of them that were right.
        """
        width = survivals.shape[1]
        found = np.flatnonzero(np.arange(width) < verified[:, None])
        rows = found // width
        chances, weights = survivals.ravel().take(found), worth.take(rows)
        right = found - width * rows < kept.take(rows)
        ranges = _ranges(chances)
        self.rest()
        self._hoped += np.bincount(ranges, weights * chances, self._hoped.size)
        self._kept += np.bincount(ranges, weights * right, self._kept.size)

    def rest(self) -> None:
        """A step verified nothing."""
        self._hoped += _FADE * (_PRIOR - self._hoped)
        self._kept += _FADE * (_PRIOR - self._kept)


def _ranges(survivals: NDArray[np.floating]) -> NDArray[np.intp]:
    """Which of the ranges each lies in."""
    found = np.zeros(survivals.shape, np.intp)
    for edge in _EDGES:
        found += survivals >= edge
    return found
