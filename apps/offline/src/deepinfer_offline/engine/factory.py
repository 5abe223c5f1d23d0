"""Which engine runs, and building it."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from deepinfer_offline.engine.base import Engine, EngineStartError
from deepinfer_offline.engine.options import EngineOptions
from deepinfer_offline.text.tokenizer import load_tokenizer
from deepinfer_offline.weights.source import resolve_model

if TYPE_CHECKING:
    from deepinfer_offline.weights.source import ModelSource


def build_engine(options: EngineOptions) -> Engine:
    """Find the model, choose the engine and start it.

    Raises:
        EngineStartError: one sentence for the user.
    """
    source = resolve_model(options.model)
    tokenizer = load_tokenizer(source.path, name=source.name)
    if choose_engine(options, source) == "vllm":
        from dataclasses import replace

        from deepinfer_offline.engine.vllm.engine import VllmEngine

        return VllmEngine(replace(options, model=str(source.path)), name=source.name, tokenizer=tokenizer)
    from deepinfer_offline.engine.native.build import build_native

    return build_native(options, source, tokenizer)


def choose_engine(options: EngineOptions, source: ModelSource) -> str:
    """`native` or `vllm`. `auto` takes vLLM where a CUDA device and vLLM are present and the model is a folder.

    Raises:
        EngineStartError: vLLM is asked to run a GGUF file.
    """
    if options.engine == "native":
        return "native"
    if options.engine == "vllm":
        if source.is_gguf:
            raise EngineStartError(
                f"--engine vllm does not read GGUF files ({source.path.name}); use --engine native, "
                "or give a Hugging Face folder"
            )
        return "vllm"
    if source.is_gguf or options.device in ("cpu", "npu") or importlib.util.find_spec("vllm") is None:
        return "native"
    import torch

    return "vllm" if torch.cuda.is_available() else "native"
