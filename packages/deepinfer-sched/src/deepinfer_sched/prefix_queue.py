"""A waiting queue that follows the prefix tree: requests that share a prefix leave it one after the other."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from deepinfer_sched.errors import SchedConfigError

T = TypeVar("T", bound=Hashable)


@dataclass(order=True, slots=True)
class _Entry(Generic[T]):
    key: bytes
    arrival: int
    item: T = field(compare=False)
    deadline: int = field(compare=False)


class PrefixQueue(Generic[T]):
    """Items in the order of their prefix keys, taken round after round.

    A key is the concatenation of an item's block hashes, so that items with a longer common prefix are neighbours and a
    depth-first walk of the prefix tree is the sorted order. `pop` goes on behind the key it gave last and starts anew at
    the end, so arrivals join the running round where their prefix belongs. An item that `patience` later arrivals have
    overtaken goes first, in the order of arrival: nothing waits for ever, however the job keeps feeding one prefix.

    Args:
        patience: how many pops an item waits at most beyond those already ahead of it when it arrives.

    Raises:
        SchedConfigError: patience is below 1.
    """

    def __init__(self, patience: int = 10_000) -> None:
        if patience < 1:
            raise SchedConfigError(f"patience must be at least 1, got {patience}")
        self.patience = patience
        self._entries: list[_Entry[T]] = []
        self._by_item: dict[T, _Entry[T]] = {}
        self._front: deque[T] = deque()
        self._by_arrival: deque[_Entry[T]] = deque()  # holds popped entries too, until they reach the head
        self._last = b""
        self._arrivals = 0
        self._pops = 0

    def push(self, item: T, key: bytes) -> None:
        """Add an item under its key. Costs a binary search and a shift of the list behind it."""
        entry = _Entry(key, self._arrivals, item, self._pops + len(self._entries) + self.patience)
        self._arrivals += 1
        self._by_item[item] = entry
        self._by_arrival.append(entry)
        insort(self._entries, entry)

    def push_front(self, item: T) -> None:
        """Put an item before all others, e.g. a preempted request that is to resume."""
        self._front.appendleft(item)

    def peek(self) -> T:
        """Return what `pop` would return, without removing it. Raises IndexError when empty."""
        if self._front:
            return self._front[0]
        return self._next().item

    def pop(self) -> T:
        """Remove and return the next item. Raises IndexError when empty."""
        if self._front:
            return self._front.popleft()
        entry = self._next()
        self._pops += 1
        self._last = entry.key
        self._drop(entry)
        return entry.item

    def remove(self, item: T) -> None:
        """Remove an item wherever it stands. Raises ValueError when it is not there."""
        entry = self._by_item.get(item)
        if entry is not None:
            self._drop(entry)
        else:
            self._front.remove(item)

    def __len__(self) -> int:
        return len(self._entries) + len(self._front)

    def __iter__(self) -> Iterator[T]:
        """The items in the order of the running round, those at the front first."""
        yield from self._front
        begin = self._position()
        for entry in self._entries[begin:] + self._entries[:begin]:
            yield entry.item

    def _next(self) -> _Entry[T]:
        if not self._entries:
            raise IndexError("the queue is empty")
        while self._by_item.get(self._by_arrival[0].item) is not self._by_arrival[0]:
            self._by_arrival.popleft()
        oldest = self._by_arrival[0]
        if oldest.deadline <= self._pops:
            return oldest
        begin = self._position()
        return self._entries[begin if begin < len(self._entries) else 0]

    def _position(self) -> int:
        return bisect_left(self._entries, self._last, key=lambda entry: entry.key)

    def _drop(self, entry: _Entry[T]) -> None:
        del self._by_item[entry.item]
        del self._entries[bisect_left(self._entries, entry)]
