# The kernel language is no Python that a type checker knows.
# pyrefly: ignore-errors
"""One program a row: norm, rotary embedding, quantised insertion, gathers."""

from __future__ import annotations

import triton
import triton.language as tl

from .decode_formats import (
    FP8,
    NVFP4,
    e2m1_code,
    e4m3_code,
    e4m3_value,
    e8m0_value,
    load_record,
    pow2_ceil_exponent,
)


@triton.jit
def rms_norm_kernel(x, stride, weight, out, out_stride, width, eps, D: tl.constexpr):
    """weight * x / sqrt(mean(x^2) + eps), float32 inside, rounded once."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, D)
    value = tl.load(x + row * stride + column, mask=column < width, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(value * value, 0) / width + eps)
    scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + column, (value * inverse * scale).to(out.dtype.element_ty), mask=column < width)


@triton.jit
def rope_kernel(x, stride_t, stride_h, out, out_stride_t, out_stride_h, cos, sin, table_stride, heads, width, pairs,
                INVERSE: tl.constexpr, COPY: tl.constexpr, BH: tl.constexpr, D: tl.constexpr, P: tl.constexpr):  # fmt: skip
    """Rotate the last 2 * pairs channels of [t, heads, width], adjacent pairs. COPY also copies the other channels."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    here = head < heads
    source = x + token * stride_t + head[:, None] * stride_h
    target = out + token * out_stride_t + head[:, None] * out_stride_h
    if COPY:
        column = tl.arange(0, D)
        mask = here[:, None] & (column < width - 2 * pairs)[None, :]
        tl.store(target + column[None, :], tl.load(source + column[None, :], mask=mask), mask=mask)
    k = tl.arange(0, P)
    c = tl.load(cos + token * table_stride + k, mask=k < pairs, other=0.0)[None, :]
    s = tl.load(sin + token * table_stride + k, mask=k < pairs, other=0.0)[None, :]
    if INVERSE:
        s = -s
    # One contiguous load of all pairs, split in registers.
    channel = tl.arange(0, 2 * P)
    mask = here[:, None] & (channel < 2 * pairs)[None, :]
    tail = width - 2 * pairs + channel[None, :]
    both = tl.reshape(tl.load(source + tail, mask=mask, other=0.0).to(tl.float32), [BH, P, 2])
    real, imag = tl.split(both)
    result = tl.reshape(tl.join(real * c - imag * s, real * s + imag * c), [BH, 2 * P])
    tl.store(target + tail, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def insert_kernel(
    x, stride, weight, eps, cos, sin, table_stride, slots, pool, stride_page, stride_row, width, pairs,
    NORM: tl.constexpr, ROPE: tl.constexpr, FORMAT: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr,
    FLOOR: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Norm (optional), rotate (optional), quantise and write one record; a negative slot writes nothing.

    Even and odd channels are two [GROUPS, GROUP / 2] tiles: a rotary pair and a byte of two codes are then lanes alike.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        group = tl.arange(0, GROUPS)
        even = group[:, None] * GROUP + 2 * tl.arange(0, GROUP // 2)[None, :]
        mask = even < width
        dtype = x.dtype.element_ty
        a = tl.load(x + row * stride + even, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(x + row * stride + even + 1, mask=mask, other=0.0).to(tl.float32)
        if NORM:
            inverse = 1.0 / tl.sqrt((tl.sum(a * a) + tl.sum(b * b)) / width + eps)
            a = (a * inverse * tl.load(weight + even, mask=mask, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
            b = (b * inverse * tl.load(weight + even + 1, mask=mask, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
        if ROPE:
            pair = (even - (width - 2 * pairs)) // 2
            rotated = mask & (even >= width - 2 * pairs)
            c = tl.load(cos + row * table_stride + pair, mask=rotated, other=1.0)
            s = tl.load(sin + row * table_stride + pair, mask=rotated, other=0.0)
            # Channels that are not rotated keep their bits: times 1, plus 0.
            real = a * c - b * s
            b = (a * s + b * c).to(dtype).to(tl.float32)
            a = real.to(dtype).to(tl.float32)
        amax = tl.max(tl.maximum(tl.abs(a), tl.abs(b)), 1)
        nan = tl.sum(((a != a) | (b != b)).to(tl.int32), 1) > 0
        amax = tl.maximum(amax, FLOOR)
        base = pool + (slot // PAGE) * stride_page + (slot % PAGE) * stride_row
        g_mask = group * GROUP < width
        if FORMAT == NVFP4:
            scale_code = e4m3_code(tl.minimum(amax / 6.0, 448.0))
            scale = e4m3_value(scale_code)
            scale_code = tl.where(nan, 0x7F, scale_code)
        else:
            peak: tl.constexpr = 448.0 if FORMAT == FP8 else 6.0
            exponent = pow2_ceil_exponent(amax * (1.0 / peak))
            scale = e8m0_value(exponent)
            scale_code = tl.where(nan, 255, exponent)
        a = tl.div_rn(a, tl.broadcast_to(scale[:, None], a.shape))
        b = tl.div_rn(b, tl.broadcast_to(scale[:, None], b.shape))
        if FORMAT == FP8:
            tl.store(base + even, e4m3_code(a).to(tl.uint8), mask=mask)
            tl.store(base + even + 1, e4m3_code(b).to(tl.uint8), mask=mask)
            tl.store(base + width + group, scale_code.to(tl.uint8), mask=g_mask)
        else:
            tl.store(base + even // 2, (e2m1_code(a) | (e2m1_code(b) << 4)).to(tl.uint8), mask=mask)
            tl.store(base + width // 2 + group, scale_code.to(tl.uint8), mask=g_mask)


@triton.jit
def gather_kernel(pool, slots, count, pool_slots, out, stride_page, stride_row, PAGE: tl.constexpr,
                  FORMAT: tl.constexpr, CHANNELS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Decode records at slots; absent rows become zeros."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    slot = tl.load(slots + row, mask=row < count, other=-1).to(tl.int64)
    valid = (slot >= 0) & (slot < pool_slots)
    base = (slot // PAGE) * stride_page + (slot % PAGE) * stride_row
    channel = tl.arange(0, D)
    value = load_record(pool, base[:, None], valid[:, None], channel[None, :], CHANNELS, FORMAT)
    mask = (row < count)[:, None] & (channel < CHANNELS)[None, :]
    tl.store(out + row[:, None] * CHANNELS + channel[None, :], value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def compress_kernel(values, gates, out, width, RATIO: tl.constexpr, D: tl.constexpr):
    """Softmax over the RATIO rows of a group, channel by channel."""
    group = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * D + tl.arange(0, D)
    mask = column < width
    top = tl.full([D], float("-inf"), tl.float32)
    for r in tl.static_range(RATIO):
        top = tl.maximum(top, tl.load(gates + (group * RATIO + r) * width + column, mask=mask, other=0.0))
    total = tl.zeros([D], tl.float32)
    norm = tl.zeros([D], tl.float32)
    for r in tl.static_range(RATIO):
        weight = tl.exp(tl.load(gates + (group * RATIO + r) * width + column, mask=mask, other=0.0) - top)
        total += weight * tl.load(values + (group * RATIO + r) * width + column, mask=mask, other=0.0)
        norm += weight
    tl.store(out + group * width + column, total / norm, mask=mask)


@triton.jit
def engram_gather_kernel(table, scales, rows, count, out, width, HAS_SCALE: tl.constexpr, D: tl.constexpr,
                         BR: tl.constexpr):  # fmt: skip
    """BR table rows a program: float rows, or e4m3 codes with an E8M0 scale for 32 channels."""
    item = (tl.program_id(0) * BR + tl.arange(0, BR)).to(tl.int64)
    row = tl.load(rows + item, mask=item < count, other=0).to(tl.int64)[:, None]
    column = tl.arange(0, D)[None, :]
    mask = (item < count)[:, None] & (column < width)
    if HAS_SCALE:
        groups = (width + 31) // 32
        value = e4m3_value(tl.load(table + row * width + column, mask=mask, other=0))
        value = value * e8m0_value(tl.load(scales + row * groups + column // 32, mask=mask, other=127))
    else:
        value = tl.load(table + row * width + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + item[:, None] * width + column, value.to(out.dtype.element_ty), mask=mask)
