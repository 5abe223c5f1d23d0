"""Number formats of the released checkpoint and of the caches: E4M3, E2M1 (two values a byte) and UE8M0 scales.

A UE8M0 byte `e` means 2^(e - 127). An E2M1 code has its sign in bit 3 and indexes 0, .5, 1, 1.5, 2, 3, 4, 6. Two codes share a
byte, the even column in the low nibble. Weight formats: FP8 with one scale for every 32x32 tile, FP8 with one scale for every
row and 32 columns (Engram tables), FP4 with one scale for every row and 32 columns (routed experts).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
WEIGHT_TILE = 32

# Midpoints of neighbouring levels. A tie goes to the even code: where the lower code is odd, the bound is moved one ulp
# down so that the midpoint itself falls into the upper bucket.
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


@lru_cache(maxsize=8)
def _e2m1_bounds(device: torch.device) -> Tensor:
    bounds = torch.tensor(_MIDPOINTS, dtype=torch.float32)
    below = torch.nextafter(bounds, torch.zeros_like(bounds))
    odd = torch.arange(len(_MIDPOINTS)) % 2 == 1
    return torch.where(odd, below, bounds).to(device)


@lru_cache(maxsize=8)
def _e2m1_pairs(device: torch.device) -> Tensor:
    """float32 [256, 2]: the two values of every byte."""
    levels = torch.tensor((*E2M1_LEVELS, *(-v for v in E2M1_LEVELS)), dtype=torch.float32)
    byte = torch.arange(256)
    return torch.stack((levels[byte & 15], levels[byte >> 4]), dim=-1).to(device)


def encode_e2m1(values: Tensor) -> Tensor:
    """Round to E2M1, ties to the even code, and pack two codes a byte.

    Args:
        values: float32 [..., n], n even, already divided by their scale; magnitudes above 6 become 6.

    Returns:
        uint8 [..., n / 2], even columns in the low nibble.
    """
    magnitude = torch.bucketize(values.abs(), _e2m1_bounds(values.device), out_int32=True)
    codes = magnitude.to(torch.uint8) | (torch.signbit(values).to(torch.uint8) << 3)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def decode_e2m1(packed: Tensor) -> Tensor:
    """Unpack bytes [..., n / 2] (uint8 or int8) to their float32 values [..., n]."""
    index = packed.view(torch.uint8).to(torch.int32)
    return functional.embedding(index, _e2m1_pairs(packed.device)).flatten(-2)


def pow2_ceil(values: Tensor) -> Tensor:
    """The smallest power of two that is not below each value. float32, positive and normal; exact, no logarithm."""
    bits = values.contiguous().view(torch.int32)
    return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def ue8m0_bytes(scales: Tensor) -> Tensor:
    """uint8 exponent bytes of float32 powers of two."""
    return (scales.contiguous().view(torch.int32) >> 23).to(torch.uint8)


def ue8m0_values(exponents: Tensor) -> Tensor:
    """float32 2^(byte - 127) of uint8 bytes or a float8_e8m0fnu tensor. Byte 0 is the subnormal 2^-127, exactly."""
    return exponents.view(torch.float8_e8m0fnu).to(torch.float32)


def _expand_scales(scales: Tensor, like: Tensor, row_block: int) -> Tensor:
    """The scale of every element of `like` [n, k], float32."""
    rows, columns = like.shape
    wide = ue8m0_values(scales).repeat_interleave(WEIGHT_TILE, dim=1)[:, :columns]
    return wide if row_block == 1 else wide.repeat_interleave(row_block, dim=0)[:rows]


def dequantize_fp8_tiles(weight: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """E4M3 [n, k] with a UE8M0 scale for each 32x32 tile, [ceil(n / 32), ceil(k / 32)], to [n, k] of `dtype`."""
    return (weight.float() * _expand_scales(scale, weight, WEIGHT_TILE)).to(dtype)


def dequantize_fp8_rows(weight: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """E4M3 [n, k] with a UE8M0 scale for each row and 32 columns, [n, ceil(k / 32)], to [n, k] of `dtype`."""
    return (weight.float() * _expand_scales(scale, weight, 1)).to(dtype)


def dequantize_fp4_rows(weight: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Packed E2M1 [n, k / 2] (int8 or uint8) with a UE8M0 scale for each row and 32 columns, to [n, k] of `dtype`."""
    values = decode_e2m1(weight)
    return (values * _expand_scales(scale, values, 1)).to(dtype)


def _block_amax(weight: Tensor, row_block: int) -> Tensor:
    rows, columns = weight.shape
    padded = functional.pad(weight.float().abs(), (0, -columns % WEIGHT_TILE, 0, -rows % row_block))
    blocks = padded.unflatten(1, (-1, WEIGHT_TILE)).unflatten(0, (-1, row_block))
    return blocks.amax(dim=(1, 3))


def _quantize_fp8(weight: Tensor, row_block: int) -> tuple[Tensor, Tensor]:
    scale = pow2_ceil(_block_amax(weight, row_block).clamp_min(1e-30) * (1 / E4M3_MAX))
    exponents = ue8m0_bytes(scale).view(torch.float8_e8m0fnu)
    quotient = weight.float() / _expand_scales(exponents, weight, row_block)
    return quotient.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), exponents


def quantize_fp8_tiles(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[n, k] to E4M3 [n, k] and float8_e8m0fnu scales [ceil(n / 32), ceil(k / 32)]; inverse of `dequantize_fp8_tiles`."""
    return _quantize_fp8(weight, WEIGHT_TILE)


def quantize_fp8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[n, k] to E4M3 [n, k] and float8_e8m0fnu scales [n, ceil(k / 32)]; inverse of `dequantize_fp8_rows`."""
    return _quantize_fp8(weight, 1)


def quantize_fp4_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[n, k], k even, to int8 [n, k / 2] and float8_e8m0fnu scales [n, ceil(k / 32)]; inverse of `dequantize_fp4_rows`."""
    scale = pow2_ceil(_block_amax(weight, 1).clamp_min(1e-30) * (1 / E2M1_MAX))
    exponents = ue8m0_bytes(scale).view(torch.float8_e8m0fnu)
    quotient = weight.float() / _expand_scales(exponents, weight, 1)
    return encode_e2m1(quotient).view(torch.int8), exponents
