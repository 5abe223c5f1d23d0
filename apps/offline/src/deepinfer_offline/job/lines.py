"""Text files as lines: split on the newline byte only, in memory that does not grow with the file."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from deepinfer_offline.job.errors import JobError

MAX_LINE_BYTES = 64 << 20  # a longer line is answered with an error; it is never held in memory
_CHUNK = 1 << 20
_ZSTD_CHUNK = 1 << 14  # compressed bytes at a time: a small chunk can unfold to thousands of times its size
_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the input that is not blank, or one row of a table.

    Attributes:
        number: its number in the file, from 1, blank lines counted.
        raw: its bytes without the line end; empty when there is a `fault`.
        fault: why the line cannot even be read as JSON, or None.
        custom_id: the name to answer a line with a `fault` under, where it is known.
    """

    number: int
    raw: bytes
    fault: str | None = None
    custom_id: str | None = None


def read_lines(path: Path) -> Iterator[Line]:
    r"""Read a text file, plain or compressed with gzip or zstd (told by its first bytes, not by its name).

    Only `\n` ends a line, so that U+2028 and its like stay inside strings. A byte order mark at the start and `\r` at
    a line's end are dropped, and blank lines are skipped.

    Args:
        path: the file.

    Yields:
        The lines in file order.

    Raises:
        JobError: the file is damaged, is UTF-16, or needs a library that is not installed.
    """
    number = 0
    try:
        with open_bytes(path) as stream:
            for number, raw in enumerate(_split(stream), start=1):
                if raw is None:
                    yield Line(number, b"", f"the line is longer than {MAX_LINE_BYTES >> 20} MiB")
                    continue
                if number == 1:
                    raw = _without_bom(raw, path)
                raw = raw.removesuffix(b"\r")
                if raw.strip(b" \t\r\v\f"):
                    yield Line(number, raw)
    except (EOFError, zlib.error, gzip.BadGzipFile, OSError) as error:
        raise JobError(f"cannot read {path} after line {number}: {error or type(error).__name__}") from error


def _split(stream: IO[bytes]) -> Iterator[bytes | None]:
    """Yield the pieces between newlines; None stands for one that is too long."""
    parts: list[bytes] = []
    held = 0
    while chunk := stream.read(_CHUNK):
        *ended, rest = chunk.split(b"\n")
        for piece in ended:
            parts.append(piece)
            yield b"".join(parts) if held + len(piece) <= MAX_LINE_BYTES else None
            parts.clear()
            held = 0
        held += len(rest)
        if held <= MAX_LINE_BYTES:
            parts.append(rest)
        else:
            parts.clear()
    if held:
        yield b"".join(parts) if held <= MAX_LINE_BYTES else None


def _without_bom(raw: bytes, path: Path) -> bytes:
    if raw.startswith(_UTF16_BOMS):
        raise JobError(f"{path} is UTF-16; convert it to UTF-8 first, e.g. `iconv -f UTF-16 -t UTF-8`")
    return raw.removeprefix(_BOM)


def open_bytes(path: Path) -> IO[bytes]:
    """Open a file for reading, decompressing it when its first bytes say that it is gzip or zstd."""
    stream = io.BufferedReader(io.FileIO(path), _CHUNK)
    magic = stream.peek(4)[:4]
    if magic.startswith(_GZIP):
        return gzip.GzipFile(fileobj=stream)  # type: ignore[return-value]
    if magic.startswith(_ZSTD):
        return _open_zstd(stream, path)
    return stream


def _open_zstd(stream: IO[bytes], path: Path) -> IO[bytes]:
    try:
        import zstandard
    except ImportError:
        raise JobError(f"{path} is zstd, and reading it needs zstandard: pip install zstandard") from None
    return io.BufferedReader(_ZstdFile(stream, zstandard), _CHUNK)


class _ZstdFile(io.RawIOBase):
    """The frames of a zstd file, one after the other. The library's own reader takes a file that was cut off as whole."""

    def __init__(self, stream: IO[bytes], zstandard: Any) -> None:
        self._stream = stream
        self._zstandard = zstandard
        self._frame: Any = None
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._stream.read(_ZSTD_CHUNK)
            if not data:
                if self._frame is not None:
                    raise EOFError("the zstd stream is cut off")
                return 0
            self._ready = memoryview(self._decompress(data))
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _decompress(self, data: bytes) -> bytes:
        parts = []
        while data:
            if self._frame is None:
                self._frame = self._zstandard.ZstdDecompressor().decompressobj()
            try:
                parts.append(self._frame.decompress(data))
            except self._zstandard.ZstdError as error:
                raise OSError(str(error)) from error
            if not self._frame.eof:
                break
            data = self._frame.unused_data
            self._frame = None
        return b"".join(parts)
