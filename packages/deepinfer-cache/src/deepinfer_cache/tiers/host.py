"""Pages in host memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from deepinfer_cache.errors import CacheConfigError


class HostTier:
    """A fixed number of page records, the least recently used overwritten first.

    Args:
        page_bytes: bytes of a record.
        max_bytes: size of the buffer; a whole number of records is used.
        buffer: memory to use instead, uint8 [rows, page_bytes], e.g. pinned; then `max_bytes` is ignored.
    """

    def __init__(self, page_bytes: int, max_bytes: int = 0, buffer: np.ndarray | None = None) -> None:
        if buffer is None:
            rows = max_bytes // page_bytes if page_bytes > 0 else 0
            if rows < 1:
                raise CacheConfigError(f"max_bytes {max_bytes} holds no page of {page_bytes} bytes")
            buffer = np.empty((rows, page_bytes), np.uint8)
        if buffer.ndim != 2 or buffer.shape[1] != page_bytes or buffer.dtype != np.uint8:
            raise CacheConfigError(
                f"buffer must be uint8 [rows, {page_bytes}], got {buffer.dtype} {list(buffer.shape)}"
            )
        self._buffer = buffer
        self._rows: OrderedDict[bytes, int] = OrderedDict()  # the least recently used comes first
        self._free = list(range(len(buffer)))

    @property
    def capacity(self) -> int:
        """Pages that fit."""
        return len(self._buffer)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    def touch(self, key: bytes) -> None:
        """`key` was used just now."""
        self._rows.move_to_end(key)

    def put(self, key: bytes, record: np.ndarray) -> None:
        """Keep a record, uint8 [page_bytes]; one that is there is replaced."""
        row = self._rows.pop(key, None)
        if row is None:
            row = self._free.pop() if self._free else self._rows.popitem(last=False)[1]
        self._buffer[row] = record
        self._rows[key] = row

    def take(self, keys: Sequence[bytes]) -> np.ndarray:
        """Copies of records that are there, uint8 [n, page_bytes]."""
        rows = [self._rows[key] for key in keys]
        for key in keys:
            self._rows.move_to_end(key)
        return self._buffer[rows]
