"""RMS norm and gated activation by the C kernels."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from deepinfer_offline.ops.cpu.build import cpu_kernels
from deepinfer_offline.ops.linear import silu_mul as portable_silu_mul
from deepinfer_offline.ops.norm import rms_norm as portable_rms_norm

_LANES = 16  # widths are processed in runs of 16 channels


def load_rms_norm() -> Any:
    """`rms_norm` of the op contract."""
    kernel = _kernel("deepinfer_rms_norm")
    kernel.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 2 + [ctypes.c_float]

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        width = x.shape[-1]
        if width % _LANES or not x.is_contiguous():
            return portable_rms_norm(x, weight, eps)
        out = torch.empty_like(x)
        kernel(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // width, width, eps)
        return out

    return rms_norm


def load_silu_mul() -> Any:
    """`silu_mul` of the op contract."""
    kernel = _kernel("deepinfer_silu_mul")
    kernel.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 2

    def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        if width % _LANES or not gate_up.is_contiguous():
            return portable_silu_mul(gate_up)
        out = gate_up.new_empty(rows, width)
        kernel(gate_up.data_ptr(), out.data_ptr(), rows, width)
        return out

    return silu_mul


def _kernel(name: str) -> Any:
    library = cpu_kernels().library
    assert library is not None, "selected although the kernels are not there"
    kernel = getattr(library, name)
    kernel.restype = None
    return kernel
