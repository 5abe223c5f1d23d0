"""What the cache asks of whoever owns the device memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class PageMover(Protocol):
    """Moves the content of pages. Calls take effect in their order, and before any step that is launched later.

    A page's record is the bytes of its blocks in every prefix group, group after group, in a layout that the mover
    fixes (`CacheConfig.page_bytes` bytes).
    """

    def read(self, pages: Sequence[int]) -> np.ndarray:
        """Records of pages as they are after every step launched so far: uint8 [n, page_bytes]."""
        ...

    def write(self, pages: Sequence[int], records: np.ndarray) -> None:
        """Fill pages from records, uint8 [n, page_bytes]."""
        ...

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole pages on the device, in all prefix groups. No page is in both lists."""
        ...


class LowerTier(Protocol):
    """Keeps records of pages outside the device, by key. `tiers.TieredStore` is one."""

    def fetch(self, keys: Sequence[bytes]) -> int:
        """How many leading keys can be taken now, checked and in host memory."""
        ...

    def take(self, keys: Sequence[bytes]) -> np.ndarray:
        """Records of keys that `fetch` found, uint8 [n, page_bytes]."""
        ...

    def wants(self, key: bytes) -> bool:
        """Whether `put` would keep this key, i.e. it is not there yet."""
        ...

    def put(self, keys: Sequence[bytes], records: np.ndarray) -> None:
        """Keep records, uint8 [n, page_bytes]."""
        ...
