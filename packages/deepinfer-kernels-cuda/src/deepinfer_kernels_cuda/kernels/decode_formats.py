# The kernel language is no Python that a type checker knows.
# pyrefly: ignore-errors
"""Device functions that read and write the record formats."""

from __future__ import annotations

import triton
import triton.language as tl

FP8: tl.constexpr = tl.constexpr(0)
NVFP4: tl.constexpr = tl.constexpr(1)
MXFP4: tl.constexpr = tl.constexpr(2)


@triton.jit
def e8m0_value(code):
    """float32 2^(code - 127) of uint8 bytes; 0 is the subnormal 2^-127, 255 is NaN."""
    exponent = code.to(tl.int32)
    bits = tl.where(exponent == 0, 0x00400000, exponent << 23)
    bits = tl.where(exponent == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e4m3_value(code):
    """float32 of e4m3 bytes, from their bits; 0x7F and 0xFF are NaN."""
    wide = code.to(tl.int32)
    magnitude = wide & 0x7F
    # 8 exponent codes up: e4m3's bias is 7, float32's 127. Subnormals are multiples of 2^-9.
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    value = tl.where(magnitude == 127, float("nan"), value)
    return tl.where(wide >= 128, -value, value)


@triton.jit
def e2m1_value(code):
    """float32 of e2m1 codes 0..15."""
    magnitude = code & 7
    normal = ((magnitude << 22) + (126 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, normal)
    return tl.where(code >= 8, -value, value)


@triton.jit
def e4m3_code(value):
    """Nearest e4m3 byte (int32) of float32 values, ties to even, magnitudes over 448 saturate; NaN gives 0x7F.

    Written out in integers so that every device and the interpreter round alike.
    """
    bits = value.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(tl.abs(value), 448.0)
    raw = magnitude.to(tl.int32, bitcast=True)
    # Normal range (>= 2^-6): round the mantissa to 3 bits, to even; a carry moves the exponent, as it should.
    rounded = (raw + 0x7FFFF + ((raw >> 20) & 1)) >> 20
    normal = rounded - (120 << 3)
    # Subnormal range: multiples of 2^-9. Adding 1.5 * 2^23 rounds to an integer, to even.
    steps = (magnitude * 512.0 + 12582912.0).to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(magnitude < 0.015625, steps, normal)
    code = tl.where(value != value, 0x7F, code)
    return tl.where(bits < 0, code | 0x80, code)


@triton.jit
def pow2_ceil_exponent(value):
    """Biased exponent (0..255) of the smallest power of two >= each positive float32."""
    return ((value.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23) & 0xFF


@triton.jit
def load_record(pool, base, valid, channels, CHANNELS: tl.constexpr, FORMAT: tl.constexpr):
    """Decode records at int64 byte offsets `base` [N, 1]: float32 [N, len(channels)]; absent rows give zeros.

    `channels` int32 [1, D] may run past CHANNELS; those columns give zeros.
    """
    mask = valid & (channels < CHANNELS)
    if FORMAT == FP8:
        code = tl.load(pool + base + channels, mask=mask, other=0)
        scale = tl.load(pool + base + CHANNELS + channels // 32, mask=mask, other=0)
        value = e4m3_value(code) * e8m0_value(scale)
    else:
        byte = tl.load(pool + base + channels // 2, mask=mask, other=0).to(tl.int32)
        code = (byte >> ((channels & 1) * 4)) & 15
        if FORMAT == NVFP4:
            scale = tl.load(pool + base + CHANNELS // 2 + channels // 16, mask=mask, other=0)
            value = e2m1_value(code) * e4m3_value(scale)
        else:
            scale = tl.load(pool + base + CHANNELS // 2 + channels // 32, mask=mask, other=0)
            value = e2m1_value(code) * e8m0_value(scale)
    return tl.where(mask, value, 0.0)
