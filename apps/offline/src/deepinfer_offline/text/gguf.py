"""Key-value metadata of a GGUF file: where its tokenizer and chat template are kept."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from deepinfer_offline.weights.gguf_cursor import DAMAGE, GgufCursor


class GGUFError(ValueError):
    """The file is not a GGUF file that this reader understands."""


def read_metadata(path: Path) -> dict[str, Any]:
    """Read all key-value pairs (GGUF versions 2 and 3, little endian). Tensors are not touched.

    Raises:
        GGUFError: wrong magic, version, value type, or a file that ends early.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = GgufCursor(data)
            _, pairs = cursor.begin()
            return dict(cursor.pair() for _ in range(pairs))
    except RecursionError as error:
        raise GGUFError(f"{path}: arrays inside arrays without end") from error
    except (struct.error, OverflowError, MemoryError) as error:
        raise GGUFError(f"{path}: the file ends inside its metadata") from error
    except DAMAGE as error:
        raise GGUFError(f"{path}: {error}") from error
