"""Which engine runs, and building it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer_offline.engine.base import Engine
from deepinfer_offline.engine.native.flags import check_flags
from deepinfer_offline.engine.options import EngineOptions
from deepinfer_offline.engine.vllm.arguments import DEFAULT_BLOCK_SIZE
from deepinfer_offline.models.registry import known_model_types
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

        return VllmEngine(
            replace(options, model=str(_vllm_folder(options, source))), name=source.name, tokenizer=tokenizer
        )
    from deepinfer_offline.engine.native.build import build_native

    return build_native(options, source, tokenizer)


def check_start(options: EngineOptions) -> None:
    """Find out what keeps an engine from starting, as far as that can be told without reading weights.

    Raises:
        EngineStartError: as `build_engine`. What needs no library is looked at first.
    """
    source = resolve_model(options.model)
    if options.engine == "native" or _is_native(options, source):
        check_flags(options, source)
    if choose_engine(options, source) == "native":
        from deepinfer_offline.engine.native.build import plan_native

        plan_native(options, source)
    elif importlib.util.find_spec("vllm") is None:
        from deepinfer_offline.engine.vllm.engine import import_vllm

        import_vllm()


def choose_engine(options: EngineOptions, source: ModelSource) -> str:
    """`native` or `vllm`. `auto` takes vLLM where a CUDA device and vLLM are present and the model is a folder."""
    if options.engine != "auto":
        return options.engine
    if _is_native(options, source):
        return "native"
    import torch

    return "vllm" if torch.cuda.is_available() else "native"


def _is_native(options: EngineOptions, source: ModelSource) -> bool:
    """Whether `auto` takes the native engine whatever devices there are."""
    if options.engine != "auto":
        return False
    return source.is_gguf or options.device in ("cpu", "npu") or importlib.util.find_spec("vllm") is None


def cache_page(options: EngineOptions, source: ModelSource) -> tuple[str, int]:
    """The engine that would run, and the tokens of the blocks in which it shares prefixes. No weights are read.

    A model that the native engine does not have is one for vLLM, here or on another machine.
    """
    engine = choose_engine(options, source)
    if engine == "native" and (options.engine == "native" or source.model_type in known_model_types()):
        from deepinfer_offline.engine.native.build import page_tokens

        return engine, page_tokens(options, source)
    return "vllm", options.block_size or DEFAULT_BLOCK_SIZE


def _vllm_folder(options: EngineOptions, source: ModelSource) -> Path:
    """The folder that vLLM loads: the source's own, or a GGUF file's contents as one."""
    if not source.is_gguf:
        return source.path
    import torch

    from deepinfer_offline.engine.vllm.export import exported_folder

    return exported_folder(source, torch.float32 if options.dtype == "float32" else torch.bfloat16)
