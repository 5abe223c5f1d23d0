"""Sequences that have no slot, best rank first."""

from __future__ import annotations

import heapq

from deepinfer_sched.sequence import Sequence, Status


class WaitingQueue:
    """A heap by `Sequence.rank`. Sequences that finished meanwhile (abort) are dropped when they come up."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Sequence]] = []
        self._count = 0

    def __len__(self) -> int:
        """Sequences that still wait."""
        return self._count

    def push(self, seq: Sequence) -> None:
        heapq.heappush(self._heap, (*seq.rank, seq))
        self._count += 1

    def pop(self) -> Sequence | None:
        """Remove and return the first one, or None."""
        while self._heap:
            seq = heapq.heappop(self._heap)[2]
            if seq.status is Status.WAITING:
                self._count -= 1
                return seq
        return None

    def forget(self) -> None:
        """A waiting sequence was marked finished; its entry is dropped later."""
        self._count -= 1
