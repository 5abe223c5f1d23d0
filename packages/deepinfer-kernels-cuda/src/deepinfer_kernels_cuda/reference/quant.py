"""Scale rules and codes of MXFP8, MXFP4 and NVFP4, in plain torch (design: V4.1 section 2.1)."""

from __future__ import annotations

import torch

E2M1_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def power_of_two_ceil(values: torch.Tensor) -> torch.Tensor:
    """Return the smallest power of two >= each positive float32, from its bits (no log2, which rounds)."""
    bits = values.to(torch.float32).view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return (exponent << 23).view(torch.float32)


def e8m0_to_float(scales: torch.Tensor) -> torch.Tensor:
    """Decode E8M0 bytes: 2^(byte - 127); 255 is NaN."""
    bits = torch.where(scales == 0, 0x00400000, scales.to(torch.int32) << 23)  # byte 0 is the subnormal 2^-127
    return torch.where(scales == 255, torch.nan, bits.to(torch.int32).view(torch.float32))


def float_to_e8m0(scales: torch.Tensor) -> torch.Tensor:
    """Encode positive powers of two (or NaN) as E8M0 bytes."""
    return ((scales.to(torch.float32).view(torch.int32) >> 23) & 0xFF).to(torch.uint8)


def encode_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Round to the nearest e2m1 code, ties to the even code; magnitudes over 6 saturate. Returns uint8 codes 0..15."""
    magnitude = values.abs().to(torch.float32)
    code = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    for edge, closed in (
        (0.25, False),
        (0.75, True),
        (1.25, False),
        (1.75, True),
        (2.5, False),
        (3.5, True),
        (5.0, False),
    ):
        code += ((magnitude >= edge) if closed else (magnitude > edge)).to(torch.uint8)
    return code | (torch.signbit(values).to(torch.uint8) << 3)


def decode_e2m1(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Decode e2m1 codes 0..15."""
    table = torch.tensor([*E2M1_LEVELS, *(-x for x in E2M1_LEVELS)], dtype=dtype, device=codes.device)
    return table[codes.long()]


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes `[..., 2n]` into bytes `[..., n]`, the even index in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of `pack_nibbles`."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def quantize_mxfp8(values: torch.Tensor, floor: float = 1e-4) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise `[..., c]` in groups of 32: (e4m3 codes as uint8 `[..., c]`, E8M0 `[..., c/32]`).

    The scale is the power of two at or above `max(amax, floor) * (1/448)` in float32; a NaN makes its group's scale NaN.
    """
    grouped = values.float().unflatten(-1, (-1, 32))
    amax = grouped.abs().amax(-1, keepdim=True)
    scale = power_of_two_ceil(amax.clamp_min(floor) * torch.tensor(1 / 448, dtype=torch.float32))
    scale = torch.where(amax.isnan(), torch.nan, scale)
    codes = (grouped / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.flatten(-2), float_to_e8m0(scale.squeeze(-1))


def dequantize_mxfp8(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Inverse of `quantize_mxfp8` (exact in bfloat16 and wider)."""
    values = codes.view(torch.float8_e4m3fn).float().unflatten(-1, (-1, 32))
    return (values * e8m0_to_float(scales)[..., None]).flatten(-2).to(dtype)


def quantize_mxfp4(values: torch.Tensor, floor: float = 6 * 2.0**-126) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise `[..., c]` in groups of 32: (packed e2m1 `[..., c/2]`, E8M0 `[..., c/32]`)."""
    grouped = values.float().unflatten(-1, (-1, 32))
    amax = grouped.abs().amax(-1, keepdim=True)
    scale = power_of_two_ceil(amax.clamp_min(floor) * torch.tensor(1 / 6, dtype=torch.float32))
    scale = torch.where(amax.isnan(), torch.nan, scale)
    codes = encode_e2m1((grouped / scale).clamp(-6, 6))
    return pack_nibbles(codes.flatten(-2)), float_to_e8m0(scale.squeeze(-1))


def dequantize_mxfp4(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Inverse of `quantize_mxfp4`."""
    values = decode_e2m1(unpack_nibbles(packed)).unflatten(-1, (-1, 32))
    return (values * e8m0_to_float(scales)[..., None]).flatten(-2).to(dtype)


def quantize_nvfp4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise `[..., c]` in groups of 16: (packed e2m1 `[..., c/2]`, e4m3 scales as uint8 `[..., c/16]`)."""
    grouped = values.float().unflatten(-1, (-1, 16))
    amax = grouped.abs().amax(-1, keepdim=True)
    scale = (amax.clamp_min(6 * 2.0**-9) / 6).clamp(max=448).to(torch.float8_e4m3fn)
    codes = encode_e2m1((grouped / scale.float()).clamp(-6, 6))
    return pack_nibbles(codes.flatten(-2)), scale.squeeze(-1).view(torch.uint8)


def dequantize_nvfp4(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Inverse of `quantize_nvfp4` (exact in bfloat16 and wider)."""
    values = decode_e2m1(unpack_nibbles(packed)).unflatten(-1, (-1, 16))
    return (values * scales.view(torch.float8_e4m3fn).float()[..., None]).flatten(-2).to(dtype)
