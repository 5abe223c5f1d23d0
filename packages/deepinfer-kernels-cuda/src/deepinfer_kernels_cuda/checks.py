"""Checks at the public boundary: each failure names the argument, its value and what is allowed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .errors import ArgumentError


def require(condition: bool, message: str | Callable[[], str]) -> None:
    """Raise `ArgumentError` with the message unless the condition holds; a callable is asked for it only then."""
    if not condition:
        raise ArgumentError(message if isinstance(message, str) else message())


def require_dtype(name: str, tensor: torch.Tensor, *allowed: torch.dtype) -> None:
    """Check a tensor's dtype against the allowed ones."""
    if tensor.dtype not in allowed:
        raise ArgumentError(f"{name} has dtype {tensor.dtype}; allowed: {', '.join(map(str, allowed))}")


def require_dims(name: str, tensor: torch.Tensor, dims: int) -> None:
    """Check a tensor's rank."""
    if tensor.dim() != dims:
        raise ArgumentError(f"{name} has shape {tuple(tensor.shape)}; it needs {dims} dimensions")


def require_inner(name: str, tensor: torch.Tensor) -> None:
    """Check that the last dimension is contiguous; every other stride is free."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ArgumentError(f"{name} has strides {tensor.stride()}; the last dimension must be contiguous")


def require_same_device(*tensors: torch.Tensor | None) -> torch.device:
    """Check that all given tensors live on one device and return it."""
    devices = {t.device for t in tensors if t is not None}
    if len(devices) != 1:
        raise ArgumentError(f"tensors live on several devices: {sorted(map(str, devices))}")
    return devices.pop()


def power_of_two(n: int) -> int:
    """The least power of two, 16 or more, that holds n: a block's width."""
    return max(16, 1 << (n - 1).bit_length())
