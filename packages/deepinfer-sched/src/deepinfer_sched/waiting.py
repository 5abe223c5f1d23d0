"""Sequences that have no slot, best rank first."""

from __future__ import annotations

import heapq
from collections import deque

from deepinfer_sched.sequence import Sequence, Status


class WaitingQueue:
    """A heap by `Sequence.rank`. Sequences that finished meanwhile (abort) are dropped when they come up."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, Sequence]] = []  # rank, sequence
        self._arrivals: deque[Sequence] = deque()  # oldest first
        self._count = 0

    def __len__(self) -> int:
        """Sequences that still wait."""
        return self._count

    def arrive(self, seq: Sequence, step: int) -> None:
        """A new sequence; `step` starts its waiting time."""
        seq.arrived = step
        self._arrivals.append(seq)
        self.push(seq)

    def push(self, seq: Sequence) -> None:
        """A sequence that was here before comes back."""
        heapq.heappush(self._heap, (*seq.rank, seq))
        self._count += 1

    def pop(self) -> Sequence | None:
        """Remove and return the first one, or None."""
        while self._heap:
            *rank, seq = heapq.heappop(self._heap)
            if seq.status is Status.WAITING and tuple(rank) == seq.rank:
                self._count -= 1
                return seq
        return None

    def forget(self) -> None:
        """A waiting sequence was marked finished; its entry is dropped later."""
        self._count -= 1

    def promote_before(self, step: int) -> None:
        """Whoever arrived before `step` and still waits goes ahead of all others from now on, in order of arrival."""
        while self._arrivals and self._arrivals[0].arrived < step:
            seq = self._arrivals.popleft()
            if seq.status is Status.WAITING and not seq.promoted:
                seq.promoted = True
                heapq.heappush(self._heap, (*seq.rank, seq))  # its old entry no longer has its rank and is skipped
