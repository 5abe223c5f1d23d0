"""Host memory over an optional directory, as one lower tier."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deepinfer_cache.tiers.disk import DiskTier
from deepinfer_cache.tiers.host import HostTier


class TieredStore:
    """Implements `mover.LowerTier`. Pages are written to both tiers and always read through host memory.

    Args:
        host: host memory; a hit can bring at most as many pages from here as it holds.
        disk: a directory, or None.
    """

    def __init__(self, host: HostTier, disk: DiskTier | None = None) -> None:
        self.host = host
        self.disk = disk

    def fetch(self, keys: Sequence[bytes]) -> int:
        """How many leading keys can be taken now. Pages that only the directory has are read and checked here."""
        found = 0
        for key in keys[: self.host.capacity]:
            if key in self.host:
                self.host.touch(key)
            else:
                record = None if self.disk is None else self.disk.get(key)
                if record is None:
                    break
                self.host.put(key, record)
            found += 1
        return found

    def take(self, keys: Sequence[bytes]) -> np.ndarray:
        """Records of keys that the last `fetch` found, uint8 [n, page_bytes]."""
        return self.host.take(keys)

    def wants(self, key: bytes) -> bool:
        """Whether the lowest tier lacks this key."""
        return key not in (self.host if self.disk is None else self.disk)

    def put(self, keys: Sequence[bytes], records: np.ndarray) -> None:
        """Keep records, uint8 [n, page_bytes], in every tier that lacks them."""
        for key, record in zip(keys, records, strict=True):
            self.host.put(key, record)
            if self.disk is not None and key not in self.disk:
                self.disk.put(key, record)
