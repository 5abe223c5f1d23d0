"""Pages in a directory that later runs, and other processes, find again."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from deepinfer_cache.errors import CacheConfigError
from deepinfer_cache.tiers.record import HEADER_BYTES, RecordError, pack, unpack

_log = logging.getLogger("deepinfer_cache")
_TRIM_TO = 0.9  # of the limit, so that not every write has to trim


class DiskTier:
    """One file a page, under `directory/<fingerprint>/<first two digits>/<key>.kv`.

    Safe to share: a file appears complete, by an atomic rename, or not at all; whatever else a reader finds under that
    name is a miss with a warning. Files of other fingerprints are neither read nor deleted.

    Args:
        directory: made if it is not there.
        mark: `fingerprint` of model, weights and layout, 16 bytes.
        page_bytes: bytes of a record's payload.
        max_bytes: most bytes that files of this fingerprint may take; the least recently used go first. 0: no limit.

    Raises:
        CacheConfigError: the directory cannot be written.
    """

    def __init__(self, directory: Path, mark: bytes, page_bytes: int, max_bytes: int = 0) -> None:
        if len(mark) != 16:
            raise CacheConfigError(f"the fingerprint has {len(mark)} bytes, it must have 16")
        self.directory = Path(directory) / mark.hex()
        self._mark = mark
        self._page_bytes = page_bytes
        self._max_bytes = max_bytes
        self._bad: set[bytes] = set()  # damaged files: to be written again
        self._failed = False  # a write failed (disk full): no more are tried
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            probe = self.directory / f".probe-{secrets.token_hex(8)}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise CacheConfigError(f"cannot write to {directory}: {error.strerror}") from error
        self._bytes = sum(size for _, size, _ in self._files())

    def __contains__(self, key: bytes) -> bool:
        return key not in self._bad and self._path(key).exists()

    @property
    def used_bytes(self) -> int:
        """Bytes of this fingerprint's files, as far as this process knows."""
        return self._bytes

    def get(self, key: bytes) -> np.ndarray | None:
        """The record of a page, uint8 [page_bytes], checked; None if there is none. A damaged file is read once."""
        if key in self._bad:
            return None
        path = self._path(key)
        try:
            data = path.read_bytes()
            payload = unpack(data, self._mark, key, self._page_bytes)
        except FileNotFoundError:
            return None
        except (RecordError, OSError) as error:
            _log.warning("%s is not used: %s", path, error.strerror if isinstance(error, OSError) else error)
            self._bad.add(key)
            return None
        with contextlib.suppress(OSError):  # gone meanwhile: another process made room
            os.utime(path)
        return np.frombuffer(payload, np.uint8)

    def put(self, key: bytes, record: np.ndarray) -> None:
        """Write a record, uint8 [page_bytes]. A full disk ends writing with a warning; reading goes on."""
        if self._failed:
            return
        path = self._path(key)
        temporary = path.with_name(f".{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
        record = np.ascontiguousarray(record)
        try:
            path.parent.mkdir(exist_ok=True)
            with temporary.open("wb") as stream:
                stream.write(pack(self._mark, key, record.data))
                stream.write(record.data)
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            _log.warning("no more pages are written to %s: %s", self.directory, error.strerror)
            self._failed = True
            return
        self._bad.discard(key)
        self._bytes += HEADER_BYTES + self._page_bytes
        if self._max_bytes and self._bytes > self._max_bytes:
            self._trim()

    def discard(self, key: bytes) -> None:
        """Delete a page's file, if there is one."""
        with contextlib.suppress(OSError):
            self._path(key).unlink(missing_ok=True)

    def _trim(self) -> None:
        """Delete the least recently used files, those of other processes included, down to 90 % of the limit."""
        files = sorted(self._files())
        self._bytes = sum(size for _, size, _ in files)
        for _, size, path in files:
            if self._bytes <= _TRIM_TO * self._max_bytes:
                return
            path.unlink(missing_ok=True)
            self._bytes -= size

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """(last use, bytes, path) of every page file."""
        for path in self.directory.glob("??/*.kv"):
            try:
                stat = path.stat()
            except OSError:
                continue  # deleted by another process
            yield stat.st_mtime, stat.st_size, path

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self.directory / name[:2] / f"{name}.kv"
