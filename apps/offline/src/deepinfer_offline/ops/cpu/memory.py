"""Memory of KV caches: huge pages on the CPU, taken as they are written."""

from __future__ import annotations

import ctypes
import math
import mmap

import torch

_HUGE = 2 << 20  # bytes of a huge page


def cache_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str | torch.device) -> torch.Tensor:
    """Zeros for a KV cache, most of which a small job never touches: `huge_zeros` on the CPU, else the device's own."""
    if torch.device(device).type == "cpu":
        return huge_zeros(shape, dtype)
    return torch.zeros(shape, dtype=dtype, device=device)


def huge_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the CPU, in huge pages where the system grants them.

    The KV cache is read a few KiB at a time all over its range: with pages of 4 KiB most reads wait for an address
    translation first. Memory is taken where it is first touched; `torch.zeros` writes all of it at once.

    Args:
        shape: any.
        dtype: any.
    """
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.zeros(shape, dtype=dtype)
    raw = mmap.mmap(-1, max(1, -(-size // _HUGE) + 1) * _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = (ctypes.c_char * len(raw)).from_buffer(raw)
    offset = -ctypes.addressof(view) % _HUGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        raw.madvise(mmap.MADV_HUGEPAGE)
    flat = torch.frombuffer(view, dtype=torch.uint8, count=size, offset=offset)
    return flat.view(dtype).view(shape)
