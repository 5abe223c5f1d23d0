"""Rows of which only the drawn id matters: a step's are looked at together, so that the loop's time does not grow with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from deepinfer_offline.engine.native.answer import Answer
    from deepinfer_offline.engine.native.results import StepResult


class PlainRows:
    """Plain answers by slot: no grammar, no stop strings, no log-probabilities.

    Args:
        max_running: slots.
        vocab_size: ids.
    """

    def __init__(self, max_running: int, vocab_size: int) -> None:
        self._seq_ids = np.full(max_running, -1, np.int64)
        self._limits = np.zeros(max_running, np.int64)
        self._may_end = np.zeros(vocab_size, np.bool_)
        self._known: set[int] = set()
        self._slots: dict[int, int] = {}

    def load(self, answer: Answer) -> None:
        """An answer has been given its slot."""
        seq = answer.seq
        self.forget(seq.seq_id)
        if not answer.is_plain:
            return
        self._slots[seq.seq_id] = seq.slot
        self._seq_ids[seq.slot], self._limits[seq.slot] = seq.seq_id, answer.limit
        ends = answer.group.stop_ids | answer.group.eos_ids
        if not ends <= self._known:
            self._known |= ends
            self._may_end[[token for token in ends if 0 <= token < len(self._may_end)]] = True

    def forget(self, seq_id: int) -> None:
        """An answer has ended, or is given another slot."""
        slot = self._slots.pop(seq_id, None)
        if slot is not None and self._seq_ids[slot] == seq_id:
            self._seq_ids[slot] = -1

    def going_on(self, result: StepResult) -> np.ndarray:
        """bool [R]: rows of plain answers that drew one token which ends nothing; every other row wants a closer look."""
        plan = result.plan
        if plan.ahead is not None:  # where its rows begin is known on the device only
            return np.zeros(plan.num_rows, np.bool_)
        plain = (result.num_tokens == 1) & (plan.drafts == 0) & (self._seq_ids[plan.slots] == plan.seq_ids)
        length = plan.starts.astype(np.int64) + plan.counts + 1
        return plain & (length < self._limits[plan.slots]) & ~self._may_end[result.token_ids[:, 0]]
