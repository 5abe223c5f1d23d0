"""Registers the C kernels as providers. Importing this compiles nothing."""

from __future__ import annotations

from typing import Any

import torch

from deepinfer_offline.ops.cpu.build import cpu_kernels
from deepinfer_offline.ops.cpu.plan import shape_reason
from deepinfer_offline.ops.registry import Provider, registry

NAME = "cpu-avx512-bf16"


def is_supported(device: str, dtype: torch.dtype) -> str | None:
    """Why the C kernels do not serve here, or None. The first call may compile them (about a second)."""
    if torch.device(device).type != "cpu":
        return "runs on the CPU only"
    if dtype != torch.bfloat16:
        return f"computes bfloat16, not {str(dtype).removeprefix('torch.')}"
    return cpu_kernels().reason


def _rms_norm() -> Any:
    from deepinfer_offline.ops.cpu.rows import load_rms_norm

    return load_rms_norm()


def _silu_mul() -> Any:
    from deepinfer_offline.ops.cpu.rows import load_silu_mul

    return load_silu_mul()


def _attention() -> Any:
    from deepinfer_offline.ops.cpu.attention import CpuAttention

    return CpuAttention


registry.register(Provider("rms_norm", NAME, "kernel", is_supported, _rms_norm, device="cpu"))
registry.register(Provider("silu_mul", NAME, "kernel", is_supported, _silu_mul, device="cpu"))
registry.register(
    Provider("paged_attention", NAME, "kernel", is_supported, _attention, accepts=shape_reason, device="cpu")
)
