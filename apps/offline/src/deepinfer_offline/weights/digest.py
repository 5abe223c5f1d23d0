"""A digest of a checkpoint's content: equal only for equal weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_offline.engine.base import EngineStartError

if TYPE_CHECKING:
    from deepinfer_offline.weights.source import ModelSource

_CHUNK = 8 << 20  # bytes read at once
_FILES = ("*.safetensors", "tokenizer.json")  # V4.1's Engram layers read the tokenizer too


def checkpoint_digest(source: ModelSource) -> bytes:
    """16 bytes over the names and the whole content of what a model is loaded from.

    Every byte is read (some GB/s with xxhash, about 1 GB/s without): a size or a date would not notice weights that were
    changed in place. Where the files lie does not matter.

    Raises:
        EngineStartError: a file cannot be read.
    """
    files = [source.path] if source.is_gguf else sorted(f for pattern in _FILES for f in source.path.glob(pattern))
    name, make = _method()
    with ThreadPoolExecutor(4, thread_name_prefix="deepinfer-digest") as pool:
        digests = list(pool.map(lambda file: _file_digest(file, make), files))
    whole = hashlib.blake2b(name.encode(), digest_size=16, person=b"deepinfer-weight")
    for file, digest in zip(files, digests, strict=True):
        label = b"" if source.is_gguf else file.name.encode()
        whole.update(len(label).to_bytes(2, "little") + label + digest)
    return whole.digest()


def _file_digest(file: Path, make: Callable[[], Any]) -> bytes:
    digest = make()
    try:
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise EngineStartError(f"cannot read {file}: {error.strerror}") from error
    return digest.digest()


def _method() -> tuple[str, Callable[[], Any]]:
    try:
        import xxhash
    except ImportError:
        return "blake2b", lambda: hashlib.blake2b(digest_size=16)
    return "xxh3", xxhash.xxh3_128
