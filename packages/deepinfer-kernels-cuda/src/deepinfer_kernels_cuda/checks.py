"""Checks at the public boundary: each failure names the argument, its value and what is allowed."""

from __future__ import annotations

import torch

from .errors import ArgumentError


def require(condition: bool, message: str) -> None:
    """Raise `ArgumentError(message)` unless the condition holds."""
    if not condition:
        raise ArgumentError(message)


def require_dtype(name: str, tensor: torch.Tensor, *allowed: torch.dtype) -> None:
    """Check a tensor's dtype against the allowed ones."""
    require(tensor.dtype in allowed, f"{name} has dtype {tensor.dtype}; allowed: {', '.join(map(str, allowed))}")


def require_dims(name: str, tensor: torch.Tensor, dims: int) -> None:
    """Check a tensor's rank."""
    require(tensor.dim() == dims, f"{name} has shape {tuple(tensor.shape)}; it needs {dims} dimensions")


def require_inner(name: str, tensor: torch.Tensor) -> None:
    """Check that the last dimension is contiguous; every other stride is free."""
    require(
        tensor.stride(-1) == 1 or tensor.shape[-1] <= 1,
        f"{name} has strides {tensor.stride()}; the last dimension must be contiguous",
    )


def require_same_device(*tensors: torch.Tensor | None) -> torch.device:
    """Check that all given tensors live on one device and return it."""
    devices = {t.device for t in tensors if t is not None}
    require(len(devices) == 1, f"tensors live on several devices: {sorted(map(str, devices))}")
    return devices.pop()


def power_of_two(n: int) -> int:
    """The least power of two, 16 or more, that holds n: a block's width."""
    return max(16, 1 << (n - 1).bit_length())
