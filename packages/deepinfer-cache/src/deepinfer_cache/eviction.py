"""Which unused page goes first."""

from __future__ import annotations

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
        self._pages: dict[int, None] = {}  # a dict keeps insertion order: the first key is the oldest

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, page: object) -> bool:
        return page in self._pages

    def add(self, page: int, key: bytes) -> None:
        self._pages[page] = None

    def remove(self, page: int) -> None:
        del self._pages[page]

    def pop(self) -> int:
        page = next(iter(self._pages))
        del self._pages[page]
        return page
