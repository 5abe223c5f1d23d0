"""Stock vLLM with a DSpark draft on a CPU, for the processes that the tests of it start: vLLM runs DSpark in its second model
runner only, whose kernels are Triton, and Triton's interpreter has to be chosen before vLLM is imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

WORKER = "deepinfer_specdec.adapters.vllm.worker.PlannedSpeculation"


def rms_norm(out, x, weight, epsilon):
    """vLLM's op of that name, which DSpark's context pass calls directly; weight [n], or one a leading index."""
    y = x * (x.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt()
    out.copy_(y * (weight if weight.dim() == 1 else weight.view(len(weight), *[1] * (x.dim() - 2), -1)))


def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox):
    """vLLM's op of that name, for halves (`is_neox`) and queries alone."""
    import torch

    assert is_neox
    assert key is None
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, -1)
    a, b = query.view(len(positions), -1, head_size).chunk(2, -1)
    query.copy_(torch.cat([a * cos - b * sin, b * cos + a * sin], -1).view_as(query))


def prepare_vllm():
    """What a GPU has and a CPU lacks: two ops, and graphs. Nothing else of vLLM is touched."""
    import torch
    import vllm.v1.worker.cpu_worker  # noqa: F401  (patches torch.cuda, before the model runner is imported)
    from deepinfer_offline.engine.vllm.cpu.attention import TorchCpuMetadataBuilder
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.worker.gpu import model_runner

    library = torch.library.Library("_C", "FRAGMENT")
    for function, schema in {
        rms_norm: "(Tensor(a!) out, Tensor x, Tensor? weight, float epsilon) -> ()",
        rotary_embedding: "(Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_size, Tensor cache, bool neox) -> ()",
    }.items():
        library.define(function.__name__ + schema)
        library.impl(function.__name__, function, "CompositeExplicitAutograd")
    VllmConfig._validate_adaptive_verification = lambda self: None  # asks for graphs
    TorchCpuMetadataBuilder._cudagraph_support = AttentionCGSupport.ALWAYS
    model_runner.resolve_adaptive_cudagraph_mode = lambda mode, **_: mode
    return library


def start(folder: Path, width: int, adapted: bool = True, engine: dict[str, Any] | None = None, **options: Any) -> Any:
    """An engine on the models in `folder`, with drafts of `width` planned under `options`, or without any."""
    from vllm import LLM

    speculative = {"method": "dspark", "model": str(folder / "draft"), "num_speculative_tokens": width,
                   "enable_adaptive_verification": True}  # fmt: skip
    adapted_options = {"speculative_config": speculative, "worker_extension_cls": WORKER,
                       "additional_config": {"deepinfer_specdec": options}}  # fmt: skip
    defaults = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 256, "max_num_seqs": 8,
                "kv_cache_memory_bytes": 1 << 20, "block_size": 16, "disable_log_stats": False,
                "kernel_config": {"enable_jit_warmup": False}}  # fmt: skip
    return LLM(str(folder / "target"), **defaults | (adapted_options if adapted else {}) | (engine or {}))


def core_of(llm):
    return llm.llm_engine.engine_core.engine_core


def runner_of(llm):
    return core_of(llm).model_executor.driver_worker.worker.model_runner
