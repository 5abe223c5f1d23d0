"""Registers the CUDA kernels as providers. Importing this loads no kernel."""

from __future__ import annotations

from typing import Any

import torch

from deepinfer_offline.ops.cuda.support import NAME, kernels, supports
from deepinfer_offline.ops.registry import Provider, registry


def _linear_reason(device: str, _dtype: torch.dtype) -> str | None:
    return None if torch.device(device).type == "cuda" else "runs on CUDA devices only"


def _linear() -> Any:
    from deepinfer_offline.ops.cuda.linear import CublasLinear

    return CublasLinear


def _attention() -> Any:
    from deepinfer_offline.ops.cuda.attention import CudaAttention

    return CudaAttention


def _attention_accepts(shape: Any) -> str | None:
    from deepinfer_offline.ops.cuda.attention import shape_reason

    return shape_reason(shape)


def _products() -> Any:
    from deepinfer_offline.ops.cuda.products import FusedProducts

    return FusedProducts


def _products_accepts(widths: Any) -> str | None:
    from deepinfer_offline.ops.cuda.products import widths_reason

    return widths_reason(widths)


registry.register(Provider("linear", "cublas", "library", _linear_reason, _linear))
registry.register(
    Provider("rms_norm", NAME, "kernel", supports("llama_norm"), lambda: kernels().llama_norm, device="cuda")
)
registry.register(Provider("silu_mul", NAME, "kernel", supports("silu_mul"), lambda: kernels().silu_mul, device="cuda"))
registry.register(
    Provider(
        "paged_attention",
        NAME,
        "kernel",
        supports("cache_slots", "cut_rows", "rope_insert", "paged_gqa", "rope_gqa"),
        _attention,
        accepts=_attention_accepts,
        device="cuda",
    )
)
registry.register(Provider("products", NAME, "kernel", supports("dense_linear"), _products, accepts=_products_accepts))
