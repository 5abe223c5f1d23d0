"""Which model a job was begun with: a digest of its files that is quick for a checkpoint of any size."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from deepinfer_offline.job.errors import JobError

_WEIGHTS = {".safetensors", ".gguf", ".bin", ".pt", ".pth"}
_OTHERS = {".json", ".jinja", ".model", ".tiktoken"}
_NAMES = {"vocab.txt", "merges.txt"}
WHOLE = 256 << 20
"""Bytes of weights up to which they are read whole: some tenths of a second."""
PIECES = 2048
"""Pieces of a larger checkpoint that are read, besides the start of each file."""
_PIECE = 8 << 10
_HEAD = 16 << 20  # of a GGUF file: more than its metadata, tokenizer and tensor list
_CHUNK = 4 << 20
_THREADS = 8


def model_identity(model: str) -> str:
    """The model's name and, for files on this machine, a digest of what they hold.

    Everything but weights (configuration, tokenizer, chat template) is read whole, and so are weights of up to `WHOLE`
    bytes. Of larger ones these are read: sizes, headers (names, types and places of all tensors, the metadata of a GGUF
    file) and `PIECES` pieces at even distances over all bytes, some 20 MB whatever the checkpoint's size. So a change of
    any stretch of more than a 2048th of the checkpoint is noticed, and with it training, merging and quantizing, which
    change whole tensors. Not noticed, in a checkpoint of over `WHOLE` bytes: an edit that falls between two pieces, such
    as a few numbers or one small tensor changed in place.

    Args:
        model: `--model` as it was given.

    Returns:
        `name#digest` for a folder or a file, wherever it lies and whatever its date; the name alone for a model that
        comes with an installed wheel.

    Raises:
        JobError: a file cannot be read.
    """
    path = Path(model).expanduser()
    if not path.exists():
        return model
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if _counts(file))
    name = path.name if path.is_file() else path.resolve().name
    try:
        facts = tuple((str(file), stat.st_size, stat.st_mtime_ns) for file in files for stat in [file.stat()])
        return f"{name}#{_digest(facts, named=path.is_dir())}"
    except OSError as error:
        raise JobError(f"cannot read the model's file {error.filename}: {error.strerror}") from error


def _counts(file: Path) -> bool:
    return (file.suffix in _WEIGHTS | _OTHERS or file.name in _NAMES) and file.is_file()


@lru_cache(maxsize=4)  # a job asks several times; the dates are here so that files that change meanwhile are read anew
def _digest(files: tuple[tuple[str, int, int], ...], *, named: bool) -> str:
    weights = sum(size for name, size, _ in files if Path(name).suffix in _WEIGHTS)
    stride = weights // PIECES if weights > WHOLE else 0
    digest = hashlib.blake2b(digest_size=8)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="deepinfer-identity") as pool:
        parts = pool.map(lambda file: _file_digest(Path(file[0]), file[1], stride), files)
        for (name, size, _), part in zip(files, parts, strict=True):
            digest.update(f"{os.path.basename(name) if named else ''} {size}\n".encode() + part)
    return digest.hexdigest()


def _file_digest(file: Path, size: int, stride: int) -> bytes:
    """16 bytes of a file; of weights only a part if there is a stride."""
    digest = hashlib.blake2b(digest_size=16)
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        whole = not stride or file.suffix not in _WEIGHTS
        for start, length in [(0, size)] if whole else _places(fd, file, size, stride):
            for offset in range(start, start + length, _CHUNK):
                digest.update(os.pread(fd, min(_CHUNK, start + length - offset), offset))
    finally:
        os.close(fd)
    return digest.digest()


def _places(fd: int, file: Path, size: int, stride: int) -> Iterator[tuple[int, int]]:
    """Where to read: the header, then a piece in the middle of every stride."""
    head = 8 + int.from_bytes(os.pread(fd, 8, 0), "little") if file.suffix == ".safetensors" else _HEAD
    yield 0, min(head, size, 8 * _HEAD)  # a damaged header may claim any length
    for start in range(min(stride, size) // 2, size, stride):
        yield start, min(_PIECE, size - start)
