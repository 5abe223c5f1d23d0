"""Triton and Gluon kernels for DeepSig V4.1 and Llama-class models on NVIDIA GPUs.

Importing the package needs only torch; Triton is loaded by the first call of a kernel.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .capability import CapabilityRow, capability_table, device_arch, is_supported
from .errors import ArgumentError, KernelError, UnsupportedDeviceError
from .layouts import FP8, LAYOUT_VERSION, MXFP4, NVFP4, RecordFormat

if TYPE_CHECKING:
    from .attention import sparse_mla_decode, sparse_mla_prefill

_LAZY = {
    "sparse_mla_decode": "attention",
    "sparse_mla_prefill": "attention",
}

__all__ = [
    "FP8",
    "LAYOUT_VERSION",
    "MXFP4",
    "NVFP4",
    "ArgumentError",
    "CapabilityRow",
    "KernelError",
    "RecordFormat",
    "UnsupportedDeviceError",
    "capability_table",
    "device_arch",
    "is_supported",
    "sparse_mla_decode",
    "sparse_mla_prefill",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
