"""Draft checkpoints as a folder: `config.json` and `model.safetensors`, in the tensor names of public DeepSpec drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from deepinfer_specdec.dspark.config import DSparkConfig
from deepinfer_specdec.dspark.model import DSparkModel
from deepinfer_specdec.errors import CheckpointError

# DeepSpec name -> ours. Whatever else is in a checkpoint must match by name and shape.
_RENAMES = (
    ("model.", ""),
    ("markov_head.markov_w1.", "markov_head.w1."),
    ("markov_head.markov_w2.", "markov_head.w2."),
)
_TARGETS_OWN = ("embed_tokens.weight", "lm_head.weight")  # copies of the target's, which is used instead


def load_draft(folder: str | Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> DSparkModel:
    """Load a draft; every tensor of the model must be in the file, and every tensor of the file must be known.

    Raises:
        CheckpointError: a missing, unknown or misshapen tensor, or a bad config.
    """
    folder = Path(folder)
    try:
        config = DSparkConfig.from_dict(json.loads((folder / "config.json").read_text()))
    except OSError as error:
        raise CheckpointError(f"{folder}: no readable config.json") from error
    tensors = {_our_name(name): tensor for name, tensor in _read(folder).items()}
    tensors = {name: tensor for name, tensor in tensors.items() if name not in _TARGETS_OWN}
    with torch.device("meta"):
        model = DSparkModel(config)
    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    missing, unknown = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if missing or unknown:
        raise CheckpointError(f"{folder}: missing {missing or 'nothing'}; not known {unknown or 'nothing'}")
    for name, shape in wanted.items():
        if tuple(tensors[name].shape) != shape:
            raise CheckpointError(f"{folder}: {name} has shape {tuple(tensors[name].shape)}; allowed: {shape}")
    model.load_state_dict({name: tensor.to(dtype) for name, tensor in tensors.items()}, assign=True)
    return model.to(device).eval()


def save_draft(model: DSparkModel, folder: str | Path) -> None:
    """Write `config.json` and `model.safetensors` (DeepSpec names)."""
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {_their_name(name): value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(model.config.to_dict(), indent=2) + "\n")


def _read(folder: Path) -> dict[str, Any]:
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise CheckpointError("draft checkpoints need safetensors: pip install safetensors") from error
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder}: no *.safetensors file")
    tensors: dict[str, Any] = {}
    for file in files:
        tensors |= load_file(file)
    return tensors


def _our_name(name: str) -> str:
    for theirs, ours in _RENAMES:
        if name.startswith(theirs):
            name = ours + name[len(theirs) :]
    return name


def _their_name(name: str) -> str:
    for theirs, ours in _RENAMES[1:]:
        if name.startswith(ours):
            name = theirs + name[len(ours) :]
    return name
