"""Key-value metadata of a GGUF file: where its tokenizer and chat template are kept."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class GGUFError(ValueError):
    """The file is not a GGUF file that this reader understands."""


def read_metadata(path: Path) -> dict[str, Any]:
    """Read all key-value pairs (GGUF versions 2 and 3, little endian). Tensors are not touched.

    Raises:
        GGUFError: wrong magic, version, value type, or a file that ends early.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _Cursor(data).pairs()
        except (struct.error, IndexError, OverflowError, MemoryError) as error:  # lengths and counts are any numbers
            raise GGUFError(f"{path}: the file ends inside its metadata") from error
        except RecursionError as error:
            raise GGUFError(f"{path}: arrays inside arrays without end") from error
        except GGUFError as error:
            raise GGUFError(f"{path}: {error}") from None


class _Cursor:
    """A reading position in the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def pairs(self) -> dict[str, Any]:
        magic, version, _, count = self.take("<4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise GGUFError(f"not a GGUF file of version 2 or 3 (magic {magic!r}, version {version})")
        found: dict[str, Any] = {}
        for _ in range(count):
            key = self.string()
            (kind,) = self.take("<I")
            found[key] = self.value(kind)
        return found

    def take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return values

    def string(self) -> str:
        (length,) = self.take("<Q")
        text = self.data[self.at : self.at + length]
        if len(text) != length:
            raise IndexError(self.at)
        self.at += length
        return text.decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            element, count = self.take("<IQ")
            if element in _SCALARS:
                return list(self.take(f"<{count}{_SCALARS[element]}"))
            return [self.value(element) for _ in range(count)]
        if kind not in _SCALARS:
            raise GGUFError(f"value type {kind} is not one of {sorted([*_SCALARS, _STRING, _ARRAY])}")
        return self.take("<" + _SCALARS[kind])[0]
