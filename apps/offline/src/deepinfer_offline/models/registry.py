"""Which class runs which `model_type`. Classes are imported only when asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from deepinfer_offline.engine.base import EngineStartError

if TYPE_CHECKING:
    from deepinfer_offline.models.base import Model

_MODELS: dict[str, str] = {}
_DRAFTS: dict[str, bool | None] = {}


def register_model(model_type: str, target: str, *, drafts: bool | None = None) -> None:
    """Let `target` ("package.module:Class") run checkpoints of `model_type`.

    `drafts`: whether they may bring a draft of their own; None leaves it to the loaded model.

    Raises:
        ValueError: `model_type` is taken by another class.
    """
    known = _MODELS.get(model_type)
    if known is not None and known != target:
        raise ValueError(f"model_type {model_type!r} is already run by {known}, cannot give it to {target}")
    _MODELS[model_type] = target
    _DRAFTS[model_type] = drafts


def known_model_types() -> tuple[str, ...]:
    """The model types that the native engine runs, sorted."""
    return tuple(sorted(_MODELS))


def may_bring_draft(model_type: str) -> bool:
    """Whether checkpoints of this type can have a draft of their own, as far as it is known before one is loaded."""
    return _DRAFTS.get(model_type) is not False


def check_model_type(model_type: str) -> None:
    """Raise EngineStartError, with the known types, for a type that no class runs."""
    if model_type not in _MODELS:
        raise EngineStartError(
            f"the native engine does not run model_type {model_type!r}; it runs {', '.join(known_model_types())}"
        )


def model_class(model_type: str) -> type[Model]:
    """Import the class that runs `model_type`.

    Raises:
        EngineStartError: no class runs it; the message lists the known types.
    """
    check_model_type(model_type)
    module, _, name = _MODELS[model_type].partition(":")
    return getattr(import_module(module), name)


for _model_type in ("llama", "qwen2", "qwen3"):
    register_model(_model_type, "deepinfer_offline.models.llama.model:LlamaModel", drafts=False)
for _model_type in ("deepseek_v41", "deepsig_v41"):
    register_model(_model_type, "deepinfer_offline.models.deepsig_v41.model:DeepSigV41Model", drafts=True)
