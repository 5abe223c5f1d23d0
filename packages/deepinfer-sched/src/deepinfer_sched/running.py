"""The sequences that hold a slot."""

from __future__ import annotations

from bisect import insort
from collections import deque

import numpy as np

from deepinfer_sched.cache import Hit
from deepinfer_sched.sequence import Sequence, Status
from deepinfer_sched.slots import SlotState


class RunningSet:
    """Sequences by rank, their slots and their numbers. A slot is handed out again behind its last step in flight.

    Attributes:
        state: numbers by slot.
        sequences: by rank, the one to preempt last.
        changes: grows whenever a slot changes hands.
    """

    def __init__(self, max_running: int) -> None:
        self.state = SlotState(max_running)
        self.sequences: list[Sequence] = []
        self.changes = 0
        self._slots: np.ndarray | None = None
        self._by_slot: dict[int, Sequence] = {}
        self._free = list(range(max_running - 1, -1, -1))
        self._fenced: deque[tuple[int, int]] = deque()  # (last step that has a row of it, slot)

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def slots(self) -> np.ndarray:
        """int32, slots of `sequences` in the same order."""
        if self._slots is None:
            self._slots = np.array([seq.slot for seq in self.sequences], np.int32)
        return self._slots

    @property
    def has_slot(self) -> bool:
        """Whether a slot can be taken now."""
        return bool(self._free)

    def in_slots(self, slots: np.ndarray) -> list[Sequence]:
        """The sequences in these slots."""
        by_slot = self._by_slot
        return [by_slot[slot] for slot in slots.tolist()]

    def open(self, seq: Sequence, limit: int, hit: Hit) -> None:
        """Give a waiting sequence the slot `Sequence.slot`, which `take_slot` returned."""
        self._by_slot[seq.slot] = seq
        self.state.open(seq.slot, seq, limit, hit)
        seq.status = Status.RUNNING
        insort(self.sequences, seq, key=_rank)
        self._changed()

    def take_slot(self) -> int:
        """A slot that no step in flight has a row of."""
        return self._free.pop()

    def close(self, seq: Sequence, applied: int) -> None:
        """Take the sequence's slot. `applied` is the last step whose results are known."""
        seq.last_step = int(self.state.last_step[seq.slot])
        self.state.close(seq.slot)
        self.sequences.remove(seq)
        if seq.last_step > applied:
            self._fenced.append((seq.last_step, seq.slot))
        else:
            self._free.append(seq.slot)
        del self._by_slot[seq.slot]
        seq.slot = -1
        self._changed()

    def complete(self, applied: int) -> None:
        """Slots without a row after step `applied` are free."""
        while self._fenced and self._fenced[0][0] <= applied:
            self._free.append(self._fenced.popleft()[1])

    def _changed(self) -> None:
        self._slots = None  # made again when it is asked for: many sequences come and go between two steps
        self.changes += 1


def _rank(seq: Sequence) -> tuple[int, int, int]:
    return seq.rank
