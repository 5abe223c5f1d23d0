"""Hugging Face folders: config.json and safetensors, in one file or in shards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_offline.engine.base import EngineStartError

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises EngineStartError if it is not one."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise EngineStartError(f"{file} is not readable JSON: {error}") from error
    if not isinstance(found, dict):
        raise EngineStartError(f"{file} is JSON, but not an object")
    return found


class FolderTensors:
    """A `TensorReader` over a folder's safetensors files.

    Raises:
        EngineStartError: no safetensors, a shard that is not there, or an unreadable file.
    """

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self._files: dict[str, Any] = {}
        self._where: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for file in _shards(folder):
            try:
                opened = safe_open(str(file), framework="pt", device="cpu")
            except Exception as error:  # safetensors raises its own untyped error from Rust
                raise EngineStartError(f"{file} is not a readable safetensors file: {error}") from error
            self._files[file.name] = opened
            for name in opened.keys():  # noqa: SIM118 - safe_open is not a mapping
                if name in self._where:
                    raise EngineStartError(f"tensor {name} is in {self._where[name]} and in {file.name}")
                self._where[name] = file.name
                self._shapes[name] = tuple(opened.get_slice(name).get_shape())

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str) -> torch.Tensor:
        return self._files[self._where[name]].get_tensor(name)

    def close(self) -> None:
        self._files.clear()


def _shards(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        where = read_json(index).get("weight_map")
        if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
            raise EngineStartError(f"{index} has no weight_map of tensor names and file names")
        names = sorted(set(where.values()))
        for name in names:
            if Path(name).name != name:
                raise EngineStartError(f"{index} names a file outside its folder: {name!r}")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise EngineStartError(f"{index} names files that are not there: {', '.join(missing[:5])}")
        return [folder / name for name in names]
    found = sorted(folder.glob("*.safetensors"))
    if found:
        return found
    if any(next(folder.glob(pattern), None) for pattern in _PICKLES):
        raise EngineStartError(
            f"{folder} holds pickle checkpoints only; they can run code when opened and are refused. "
            "Convert the model to safetensors"
        )
    raise EngineStartError(f"{folder} holds no .safetensors file")
