"""Whether the CUDA kernels are there, asked in one place."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import Any

import torch

from deepinfer_offline.ops.registry import SupportFn

NAME = "deepinfer-kernels-cuda"
INSTALL = "pip install ./packages/deepinfer-kernels-cuda in a clone (not on PyPI yet)"


@lru_cache(maxsize=1)
def kernels() -> Any:
    """The package, or None where it is not installed."""
    try:
        return import_module("deepinfer_kernels_cuda")
    except ImportError:
        return None


def reason(op: str, device: str, dtype: torch.dtype) -> str | None:
    """Why the kernel `op` does not run on a device, or None if it does."""
    if torch.device(device).type != "cuda":
        return "runs on CUDA devices only"
    package = kernels()
    if package is None:
        return f"{NAME} is not installed; {INSTALL}"
    return package.is_supported(op, device, dtype)


def supports(*ops: str) -> SupportFn:
    """`Provider.is_supported` of something that needs these kernels."""

    def ask(device: str, dtype: torch.dtype) -> str | None:
        return next((why for op in ops if (why := reason(op, device, dtype)) is not None), None)

    return ask
