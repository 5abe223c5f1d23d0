"""Which unused page goes first."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Protocol


class Evictor(Protocol):
    """The set of pages that hold a cached prefix and that nobody uses at the moment."""

    def __len__(self) -> int: ...

    def __contains__(self, page: object) -> bool: ...

    def add(self, page: int, key: bytes) -> None:
        """The last user let go of `page`, which caches `key`."""

    def remove(self, page: int) -> None:
        """`page` is used again, or forgotten."""

    def pop(self) -> int:
        """Remove and return the page to evict. The set must not be empty."""


class LruEvictor:
    """Evicts the page that has been unused for longest. Every operation is O(1)."""

    def __init__(self) -> None:
        self._pages: OrderedDict[int, None] = OrderedDict()  # the oldest comes first

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, page: object) -> bool:
        return page in self._pages

    def add(self, page: int, key: bytes) -> None:
        self._pages[page] = None

    def remove(self, page: int) -> None:
        del self._pages[page]

    def pop(self) -> int:
        return self._pages.popitem(last=False)[0]


class NextUseEvictor:
    """Evicts the page whose next use is farthest away (Belady); pages without a known use go first, oldest first.

    Uses are announced with `expect` and taken back with `meet`. Every operation is O(log n), amortised: outdated heap
    entries are skipped, and the heap is rebuilt when they outnumber the others.
    """

    def __init__(self) -> None:
        self._pages: dict[int, tuple[int, int]] = {}  # page -> its valid heap priority
        self._keys: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._uses: dict[bytes, list[int]] = {}  # key -> positions of its future uses, ascending
        self._heap: list[tuple[int, int, int]] = []  # (-next use or -infinity, order of release, page)
        self._clock = 0

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, page: object) -> bool:
        return page in self._pages

    def expect(self, keys: Sequence[bytes], position: int) -> None:
        """The request at `position` of the job will use `keys`."""
        for key in keys:
            uses = self._uses.setdefault(key, [])
            if not uses or uses[-1] <= position:
                uses.append(position)
            else:
                insort(uses, position)
            if uses[0] == position:
                self._refresh(key)

    def meet(self, keys: Sequence[bytes], position: int) -> None:
        """The request at `position` has come (or will never come): its expected uses are over."""
        for key in keys:
            uses = self._uses.get(key)
            if uses is None or position not in uses:
                continue
            first = uses[0] == position
            uses.remove(position)
            if not uses:
                del self._uses[key]
            if first:
                self._refresh(key)

    def add(self, page: int, key: bytes) -> None:
        self._clock += 1
        self._keys[page], self._page_of[key] = key, page
        self._push(page, self._clock)

    def remove(self, page: int) -> None:
        del self._pages[page]
        del self._page_of[self._keys.pop(page)]

    def pop(self) -> int:
        while True:
            distance, order, page = heappop(self._heap)
            if self._pages.get(page) == (distance, order):
                self.remove(page)
                return page

    def _refresh(self, key: bytes) -> None:
        page = self._page_of.get(key)
        if page is not None:
            self._push(page, self._pages[page][1])

    def _push(self, page: int, order: int) -> None:
        uses = self._uses.get(self._keys[page])
        priority = (-uses[0] if uses else _UNKNOWN, order)
        self._pages[page] = priority
        heappush(self._heap, (*priority, page))
        if len(self._heap) > 2 * len(self._pages) + 1024:
            self._heap = [(*priority, page) for page, priority in self._pages.items()]
            heapify(self._heap)


_UNKNOWN = -(2**62)
