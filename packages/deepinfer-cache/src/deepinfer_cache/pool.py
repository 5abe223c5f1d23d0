"""Pages of the prefix groups: reference counts, the prefix index, and what can be handed out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from deepinfer_cache.eviction import Evictor
from deepinfer_cache.partial import PartialIndex


class PagePool:
    """Hands out pages 1 .. `num_pages`; page 0 is never handed out.

    A page is in one of three places: used (`refs > 0`), cached (unused, but found by its key), or free.
    """

    def __init__(self, num_pages: int, evictor: Evictor) -> None:
        self.num_pages = num_pages
        self.refs = [0] * (num_pages + 1)
        self.keys: list[bytes | None] = [None] * (num_pages + 1)  # the prefix that the page's content stands for
        self.index: dict[bytes, int] = {}
        self.evictor = evictor
        self.partial = PartialIndex()
        self.evictions = 0
        self._free = list(range(num_pages, 0, -1))

    @property
    def available(self) -> int:
        """Pages that `take` can hand out now."""
        return len(self._free) + len(self.evictor)

    @property
    def used(self) -> int:
        return self.num_pages - self.available

    def lookup(self, keys: Iterable[bytes]) -> list[int]:
        """Pages of the longest run of `keys` that is cached. Changes nothing."""
        pages = []
        for key in keys:
            page = self.index.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def take(self, count: int) -> list[int]:
        """Hand out `count` pages with one reference each, evicting cached ones when none is free."""
        assert count <= self.available, f"{count} pages asked, {self.available} available"
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self.refs[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Add one reference to pages that hold content."""
        for page in pages:
            if self.refs[page] == 0:
                self.evictor.remove(page)
            self.refs[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drop one reference of each page. Later pages become evictable first: a prefix outlives what follows it."""
        for page in reversed(pages):
            assert self.refs[page] > 0, f"page {page} released more often than used"
            self.refs[page] -= 1
            if self.refs[page] == 0:
                key = self.keys[page]
                if key is None:
                    self.partial.forget(page)
                    self._free.append(page)
                else:
                    self.evictor.add(page, key)

    def publish(self, page: int, key: bytes) -> bool:
        """Make a used page findable. False when another page already stands for `key`; this one then stays private."""
        assert self.refs[page] > 0, f"page {page} is not in use"
        if self.index.setdefault(key, page) != page:
            return False
        self.keys[page] = key
        return True

    def forget_unused(self) -> int:
        """Drop every cached, unused page. Returns how many."""
        count = len(self.evictor)
        self._free.extend(self._evict() for _ in range(count))
        return count

    def free_pages(self) -> list[int]:
        """Pages that hold nothing."""
        return list(self._free)

    def _evict(self) -> int:
        page = self.evictor.pop()
        key = self.keys[page]
        assert key is not None, f"page {page} is evictable and stands for nothing"
        del self.index[key]
        self.keys[page] = None
        self.partial.forget(page)
        self.evictions += 1
        return page
