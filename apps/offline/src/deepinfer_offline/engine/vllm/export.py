"""A GGUF checkpoint as the Hugging Face folder that vLLM loads, written once into the user's cache."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from deepinfer_offline.engine.base import EngineStartError
from deepinfer_offline.weights.digest import checkpoint_digest
from deepinfer_offline.weights.source import ModelSource

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def cache_folder() -> Path:
    """`exported` in `$DEEPINFER_CACHE_DIR`, by default in `$XDG_CACHE_HOME/deepinfer` or `~/.cache/deepinfer`."""
    own = os.environ.get("DEEPINFER_CACHE_DIR")
    base = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "deepinfer"
    return base.expanduser() / "exported"


def exported_folder(source: ModelSource, dtype: torch.dtype) -> Path:
    """Return a folder with the checkpoint's weights in `dtype`, its configuration and its tokenizer.

    The folder is named after a digest of the whole file, so weights that were changed in place are exported anew. Two
    processes may export at once: each writes beside the place and the last rename wins, with equal content.

    Raises:
        EngineStartError: the architecture has no vLLM counterpart, or the cache cannot be written.
    """
    model_type = source.model_type
    if model_type not in ARCHITECTURES:
        raise EngineStartError(f"no vLLM model for GGUF architecture {model_type!r}; use --engine native")
    name = str(dtype).removeprefix("torch.")
    target = cache_folder() / f"{source.name}-{name}-{checkpoint_digest(source).hex()[:16]}"
    if (target / "config.json").is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            _write(source, dtype, Path(scratch) / "model")
            if target.exists():  # half a folder of an older crash, or another process was faster
                shutil.rmtree(target)
            os.replace(Path(scratch) / "model", target)
    except OSError as error:
        raise EngineStartError(f"cannot write the exported model to {target.parent}: {error}") from error
    return target


def _write(source: ModelSource, dtype: torch.dtype, folder: Path) -> None:
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    folder.mkdir()
    tokenizer: Any = AutoTokenizer.from_pretrained(source.path.parent, gguf_file=source.path.name)
    tokenizer.save_pretrained(folder)
    reader = source.open()
    tensors = {tensor: reader.read(tensor).to(dtype).contiguous() for tensor in reader.shapes}
    reader.close()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = dict(source.config) | {
        "architectures": [ARCHITECTURES[source.model_type]],
        "dtype": str(dtype).removeprefix("torch."),
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))  # last: its presence says that all is there
