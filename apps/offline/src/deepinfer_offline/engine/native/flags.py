"""Flags that the native engine cannot follow, told before anything is imported or read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from deepinfer_offline.engine.base import EngineStartError
from deepinfer_offline.models.registry import check_model_type, may_bring_draft

if TYPE_CHECKING:
    from deepinfer_offline.engine.options import EngineOptions
    from deepinfer_offline.weights.source import ModelSource


def check_flags(options: EngineOptions, source: ModelSource) -> None:
    """Refuse what this engine does not do, instead of doing something else silently.

    Raises:
        EngineStartError: it names the flag.
    """
    check_model_type(source.model_type)
    parallel: Mapping[str, int] = {
        "tensor-parallel": options.tensor_parallel_size,
        "data-parallel": options.data_parallel_size,
    }
    for name, size in parallel.items():
        if size > 1:
            raise EngineStartError(f"--{name} {size}: the native engine runs on one device; use --engine vllm")
    if options.expert_parallel:
        raise EngineStartError("--expert-parallel: the native engine runs on one device; use --engine vllm")
    if options.engine_args:
        names = ", ".join(name for name, _ in options.engine_args)
        raise EngineStartError(f"--engine-arg {names}: the native engine takes none; use --engine vllm")
    if options.kv_store is not None and not options.enable_prefix_caching:
        raise EngineStartError("--kv-store keeps prefixes of prompts: it needs --prefix-caching")
    if options.draft_model is not None and not (options.draft_model / "config.json").is_file():
        raise EngineStartError(f"--draft-model {options.draft_model}: it is not a folder with a config.json")
    if options.speculative == "dspark" and options.draft_model is None and not may_bring_draft(source.model_type):
        raise EngineStartError(NO_DRAFT)


NO_DRAFT = "--speculative dspark: the model brings no draft of its own; give one with --draft-model, or use auto"
