"""Descriptors of matrices for Hopper's bulk tensor copies, as the driver encodes them."""

from __future__ import annotations

import ctypes
import functools

import torch

from .native import _check_driver, _driver

BYTES = 128
_BFLOAT16, _SWIZZLE_128, _PROMOTE_256 = 9, 3, 3
_COLUMNS = 64  # 128 bytes, as wide as the swizzle


def fits_map(x: torch.Tensor) -> bool:
    """Whether rows of a bfloat16 matrix lie as bulk tensor copies want them: 16-byte addresses and distances."""
    apart = x.stride(0)
    return (
        x.dtype == torch.bfloat16 and x.stride(1) == 1 and apart >= x.shape[1] and (apart | x.data_ptr() // 2) % 8 == 0
    )


def tensor_map(x: torch.Tensor, rows: int) -> bytes:
    """The descriptor (`BYTES`) of bfloat16 x [n, d] for boxes of `rows` rows and 64 columns, 128-byte swizzle; zeros outside.

    Raises:
        NativeError: The driver's words.
    """
    return _encode(x.data_ptr(), *x.shape, 2 * x.stride(0), rows)


@functools.lru_cache(maxsize=512)
def _encode(address: int, n: int, d: int, stride: int, rows: int) -> bytes:
    memory = (ctypes.c_uint8 * (BYTES + 64))()
    start = ctypes.addressof(memory)
    skip = -start % 64  # the driver wants it aligned
    result = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(start + skip), _BFLOAT16, 2, ctypes.c_void_p(address), (ctypes.c_uint64 * 2)(d, n),
        (ctypes.c_uint64 * 1)(stride), (ctypes.c_uint32 * 2)(_COLUMNS, rows), (ctypes.c_uint32 * 2)(1, 1), 0,
        _SWIZZLE_128, _PROMOTE_256, 0,
    )  # fmt: skip
    _check_driver(result, f"descriptor of a matrix [{n}, {d}]")
    return bytes(memory[skip : skip + BYTES])
