"""Where a GGUF file is being read, and the values that come next (versions 2 and 3, little endian)."""

from __future__ import annotations

import struct
from mmap import mmap
from typing import Any

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

DAMAGE = (ValueError, TypeError, LookupError, ArithmeticError, MemoryError, RecursionError, struct.error)
"""What reading a damaged file may raise: its counts, lengths and types are any numbers."""


class GgufCursor:
    """A reading position in the head of a file. Every method raises one of `DAMAGE` where there is no such thing.

    Args:
        data: of the file.

    Attributes:
        at: bytes read so far.
    """

    def __init__(self, data: mmap) -> None:
        self.data, self.at = data, 0

    def begin(self) -> tuple[int, int]:
        """Numbers of tensors and of pairs that the file announces."""
        magic, version, tensors, pairs = self.take("<4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"magic {magic!r} and version {version}, not b'GGUF' and 2 or 3")
        return tensors, pairs

    def take(self, layout: str) -> tuple[Any, ...]:
        """Values of a `struct` layout."""
        values = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return values

    def string(self) -> str:
        """A text."""
        (length,) = self.take("<Q")
        if length > len(self.data) - self.at:
            raise ValueError(f"a text of {length} bytes at byte {self.at} of {len(self.data)}")
        self.at += length
        return self.data[self.at - length : self.at].decode("utf-8", errors="replace")

    def strings(self, count: int) -> list[str] | None:
        """An array of texts."""
        return [self.string() for _ in range(count)]

    def pair(self) -> tuple[str, Any]:
        """A name and its value."""
        key = self.string()
        return key, self.value(self.take("<I")[0])

    def value(self, kind: int) -> Any:
        """A value of a type by its number."""
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.take("<" + _scalar(kind))[0]
        element, count = self.take("<IQ")
        if element == _STRING:
            return self.strings(count)
        if element == _ARRAY:
            return [self.value(element) for _ in range(count)]
        return list(self.take(f"<{count}{_scalar(element)}"))


def _scalar(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"value type {kind} is not one of {sorted([*_SCALARS, _STRING, _ARRAY])}")
    return _SCALARS[kind]
