"""OUTPUT.journal: every answer is appended here the moment it is there, and survives a crash at any byte."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer_offline.job.codec import dumps, loads
from deepinfer_offline.job.errors import JobError

VERSION = 1
SYNC_SECONDS = 1.0
"""A power cut loses at most the answers of this long; the death of the process alone loses none."""
_CHUNK = 1 << 20
_HEADER_START = b'{"deepinfer_journal"'


class Journal:
    r"""An append-only file of checksummed lines: a header, then one record an answer, in the order of completion.

    Every line is `crc32 (8 hex digits) SPACE payload \n`. The header's payload is JSON; a record's is
    `record-number SPACE status SPACE result-line`. A line whose checksum is wrong is no answer, wherever it stands, and
    a last line without its newline is cut off. Of two records of one number the later one counts.

    Args:
        path: the file; it is made if it is not there.
        fd: a descriptor of it, opened for reading and writing, whose lock the caller holds.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.header: dict[str, Any] = {}
        self.damaged = 0
        self._fd = fd
        self._end = 0
        self._synced_at = time.monotonic()
        self._dirty = False
        self.offset: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self.length: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self.status: NDArray[np.int16] = np.zeros(0, dtype=np.int16)

    def read_header(self) -> dict[str, Any]:
        """Read the header; {} for a new file. Raises JobError when there is something else at the file's start."""
        if os.fstat(self._fd).st_size == 0:
            return {}
        start = os.pread(self._fd, _CHUNK, 0)
        line, newline, _ = start.partition(b"\n")
        payload = _checked(line)
        if not newline and _is_torn_header(start):
            return {}  # a crash while the header was written: nothing was answered yet
        try:
            header = loads(payload) if payload is not None and newline else None
        except ValueError:
            header = None
        if not isinstance(header, dict) or header.get("deepinfer_journal") != VERSION:
            raise JobError(f"{self.path} is not a journal of this version of deepinfer; move it away or pass --fresh")
        self.header = header
        return header

    def start(self, header: dict[str, Any], records: int) -> None:
        """Empty the file and write a header. `records` is how many the job has."""
        os.ftruncate(self._fd, 0)
        self._end = 0
        self.allocate(records)
        self.header = {"deepinfer_journal": VERSION, **header}
        self._append(_line(dumps(self.header)))
        self.sync()

    def recover(self, records: int) -> int:
        """Find what an earlier run answered, and cut off what it did not finish to write.

        Args:
            records: how many the job has.

        Returns:
            The number of records that are answered.
        """
        self.allocate(records)
        position = 0
        held = b""
        while chunk := os.pread(self._fd, _CHUNK, position + len(held)):
            *lines, held = (held + chunk).split(b"\n")
            for line in lines:
                if position:
                    self._recover_line(line, position)
                position += len(line) + 1
        os.ftruncate(self._fd, position)
        self._end = position
        return int((self.length > 0).sum())

    def append(self, record: int, status: int, result: bytes) -> None:
        """Store the answer of one record.

        Args:
            record: its number.
            status: HTTP status, 0 for an answer that has none.
            result: the OUTPUT line without its newline.

        Raises:
            JobError: the disk is full or failed.
        """
        payload = b"%d %d %b" % (record, status, result)
        self._index(record, status, self._end + 9 + len(payload) - len(result), len(result))
        self._append(_line(payload))

    def result(self, record: int) -> bytes:
        """The stored OUTPUT line of a record that `answered` holds."""
        return os.pread(self._fd, int(self.length[record]), int(self.offset[record]))

    def answered(self) -> NDArray[np.bool_]:
        """bool [records], which are answered."""
        return self.length > 0

    def forget(self, wanted: Callable[[NDArray[np.int16]], NDArray[np.bool_]]) -> int:
        """Take answers for not given, by their status. Returns how many."""
        chosen = self.answered() & wanted(self.status)
        self.length[chosen] = 0
        return int(chosen.sum())

    def tick(self) -> None:
        """Flush to the disk if the last flush is over `SYNC_SECONDS` ago."""
        if self._dirty and time.monotonic() - self._synced_at >= SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Flush to the disk."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise self._failed(error) from error
        self._dirty = False
        self._synced_at = time.monotonic()

    def allocate(self, records: int) -> None:
        """Make room for the places of `records` answers, all of them missing."""
        self.offset = np.zeros(records, dtype=np.int64)
        self.length = np.zeros(records, dtype=np.int64)
        self.status = np.zeros(records, dtype=np.int16)

    def _index(self, record: int, status: int, offset: int, length: int) -> None:
        self.offset[record], self.length[record], self.status[record] = offset, length, status

    def _recover_line(self, line: bytes, position: int) -> None:
        payload = _checked(line)
        fields = payload.split(b" ", 2) if payload is not None else []
        if len(fields) != 3 or not 0 <= int(fields[0]) < len(self.length):
            self.damaged += 1
            return
        record, status, result = int(fields[0]), int(fields[1]), fields[2]
        self._index(record, status, position + len(line) - len(result), len(result))

    def _append(self, line: bytes) -> None:
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.pwrite(self._fd, rest, self._end + len(line) - len(rest)) :]
        except OSError as error:
            raise self._failed(error) from error
        self._end += len(line)
        self._dirty = True

    def _failed(self, error: OSError) -> JobError:
        return JobError(f"cannot write {self.path}: {error.strerror}")


def _is_torn_header(start: bytes) -> bool:
    """Whether a file that has no newline is the beginning of a header."""
    checksum, space, payload = start[:8], start[8:9], start[9:]
    is_shaped = all(byte in b"0123456789abcdef" for byte in checksum) and space in (b"", b" ")
    return is_shaped and (_HEADER_START.startswith(payload) or payload.startswith(_HEADER_START))


def _line(payload: bytes) -> bytes:
    return b"%08x %b\n" % (zlib.crc32(payload), payload)


def _checked(line: bytes) -> bytes | None:
    """The payload of a line whose checksum is right."""
    payload = line[9:]
    return payload if line[:9] == b"%08x " % zlib.crc32(payload) else None
