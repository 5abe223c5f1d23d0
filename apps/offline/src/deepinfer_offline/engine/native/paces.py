"""How many tokens sequences emit per verification."""

from __future__ import annotations

import numpy as np

_RATE = 0.05  # weight of one verification


class Paces:
    """Moving averages by slot; 1 for a sequence of which nothing is known. One that comes back to another slot begins anew.

    Args:
        slots: rows that can run at once.
    """

    def __init__(self, slots: int) -> None:
        self._paces = np.ones(slots)
        self._of = np.full(slots, -1, np.int64)  # the sequence that a slot's pace is of

    def of(self, slots: np.ndarray, seq_ids: np.ndarray) -> np.ndarray:
        """float64 [R], tokens per verification of the sequences [R] in these slots [R]."""
        return np.where(self._of[slots] == seq_ids, self._paces[slots], 1.0)

    def learn(self, slots: np.ndarray, seq_ids: np.ndarray, emitted: np.ndarray) -> None:
        """Each of the sequences [R] emitted so many tokens [R] in a step."""
        paces = self.of(slots, seq_ids)
        self._paces[slots] = paces + _RATE * (emitted - paces)
        self._of[slots] = seq_ids
