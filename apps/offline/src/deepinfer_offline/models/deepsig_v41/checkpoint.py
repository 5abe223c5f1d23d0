"""Connects the loader to a checkpoint folder: tensor dtypes, and the tokenizer that Engram hashes by."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from deepinfer_offline.engine.base import EngineStartError
from deepinfer_offline.models.deepsig_v41.config import V41Config

if TYPE_CHECKING:
    from deepinfer_offline.weights.reader import TensorReader
    from deepinfer_offline.weights.source import ModelSource

_HEADER_LIMIT = 100 << 20  # bytes; safetensors' own limit


def stored_dtypes(folder: Path) -> dict[str, str]:
    """Dtype name of every tensor in a folder's safetensors files, from their headers."""
    found: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > _HEADER_LIMIT:
                raise EngineStartError(f"{path} has a header of {size} bytes, which no safetensors file has")
            header = json.loads(file.read(size))
        found.update((name, entry["dtype"]) for name, entry in header.items() if name != "__metadata__")
    return found


class FolderReader:
    """The loader's view of a checkpoint folder."""

    def __init__(self, source: ModelSource) -> None:
        if source.is_gguf:
            raise EngineStartError(f"{source.path} is a GGUF file; V4.1 checkpoints are read from safetensors folders")
        self._tensors: TensorReader = source.open()
        self._dtypes = stored_dtypes(source.path)

    def names(self) -> Iterable[str]:
        return self._tensors.shapes.keys()

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        return self._dtypes[name], tuple(self._tensors.shapes[name])

    def read(self, name: str) -> Tensor:
        return self._tensors.read(name)

    def close(self) -> None:
        self._tensors.close()


def engram_token_map(source: ModelSource, config: V41Config) -> np.ndarray | None:
    """The token map of the checkpoint's own tokenizer; None when no layer needs it.

    Raises:
        EngineStartError: the tokenizer is not there, or cannot be read.
    """
    if not config.active_engram_layers:
        return None
    file = source.path / "tokenizer.json"
    if not file.is_file():
        raise EngineStartError(
            f"{source.path} has no tokenizer.json, which Engram layers {list(config.active_engram_layers)} hash tokens by"
        )
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise EngineStartError("Engram layers need the tokenizers package: pip install tokenizers") from error
    from deepinfer_offline.models.deepsig_v41.engram import compressed_token_map

    try:
        return compressed_token_map(Tokenizer.from_file(str(file)))
    except Exception as error:  # tokenizers raises plain Exception
        raise EngineStartError(f"{file} is not a readable tokenizer: {error}") from error
