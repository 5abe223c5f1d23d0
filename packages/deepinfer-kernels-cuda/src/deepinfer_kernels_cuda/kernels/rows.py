# The kernel language is no Python that a type checker knows.
# pyrefly: ignore-errors
"""Rows in 16-byte pieces: norm, rotary embedding, quantised insertion, gathers, pooling."""

from __future__ import annotations

import triton
import triton.language as tl

from .decode_formats import (
    FP8,
    NVFP4,
    e4m3_code,
    e4m3_value,
    e8m0_value,
    pow2_ceil_exponent,
)
from .dependent import begin


@triton.jit
def _norm_row(x, weight, out, width, eps, D: tl.constexpr, REST: tl.constexpr):
    """One row of `rms_norm_kernel`."""
    first = tl.arange(0, D)
    a = tl.load(x + first, mask=first < width, other=0.0).to(tl.float32)
    square = tl.sum(a * a, 0)
    if REST > 0:
        second = D + tl.arange(0, REST)
        b = tl.load(x + second, mask=second < width, other=0.0).to(tl.float32)
        square += tl.sum(b * b, 0)
    inverse = 1.0 / tl.sqrt(square / width + eps)
    scale = tl.load(weight + first, mask=first < width, other=0.0).to(tl.float32)
    tl.store(out + first, (a * inverse * scale).to(out.dtype.element_ty), mask=first < width)
    if REST > 0:
        scale = tl.load(weight + second, mask=second < width, other=0.0).to(tl.float32)
        tl.store(out + second, (b * inverse * scale).to(out.dtype.element_ty), mask=second < width)


@triton.jit
def rms_norm_kernel(
    x, stride, weight, out, out_stride, width, eps, D: tl.constexpr, REST: tl.constexpr, PDL: tl.constexpr = False
):
    """weight * x / sqrt(mean(x^2) + eps), float32 inside, rounded once; a row is D + REST channels."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    _norm_row(x + row * stride, weight, out + row * out_stride, width, eps, D, REST)


@triton.jit
def rope_kernel(x, stride_t, stride_h, out, out_stride_t, out_stride_h, cos, sin, table_stride, heads, width, pairs,
                INVERSE: tl.constexpr, COPY: tl.constexpr, BH: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
                      PDL: tl.constexpr = False):  # fmt: skip
    """Rotate the last 2 * pairs channels of [t, heads, width], adjacent pairs. COPY also copies the other channels."""
    begin(PDL)
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
def _fp8_code(value, HARDWARE: tl.constexpr):
    """e4m3 byte, to nearest even, saturating; both ways give the same bits."""
    if HARDWARE:
        return value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return e4m3_code(value).to(tl.uint8)


@triton.jit
def _fp4_code(value):
    """Nearest e2m1 code (int32), ties to the even code, magnitudes over 6 saturate."""
    size = tl.minimum(tl.abs(value), 6.0)
    bits = size.to(tl.int32, bitcast=True)
    # From 1 on: keep one bit of the mantissa, to even. Below: adding 1.5 * 2^22 rounds to halves, to even.
    normal = ((bits + 0x1FFFFF + ((bits >> 22) & 1)) >> 22) - 252
    halves = (size + 6291456.0).to(tl.int32, bitcast=True) & 3
    return tl.where(size < 1.0, halves, normal) | ((value.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def _normed(x, weight, eps, WIDTH: tl.constexpr, D: tl.constexpr):
    """RMS norm of loaded rows, rounded to their dtype."""
    column = tl.arange(0, D)
    wide = x.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(wide * wide, 1) / WIDTH + eps)
    scale = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    return (wide * inverse[:, None] * scale[None, :]).to(x.dtype)


@triton.jit
def _rotated(x, cos, sin, at, table_stride, here, ROWS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
             PAIRS: tl.constexpr):  # fmt: skip
    """Even and odd channels of rows [ROWS, D], the last PAIRS pairs before WIDTH rotated and rounded to the rows' dtype."""
    a, b = tl.split(tl.reshape(x, [ROWS, D // 2, 2]))
    a, b = a.to(tl.float32), b.to(tl.float32)
    if PAIRS > 0:
        pair = tl.arange(0, D // 2) - (WIDTH // 2 - PAIRS)
        turned = here[:, None] & ((pair >= 0) & (pair < PAIRS))[None, :]
        # Channels that are not rotated keep their bits: times 1, plus 0.
        c = tl.load(cos + at[:, None] * table_stride + pair[None, :], mask=turned, other=1.0)
        s = tl.load(sin + at[:, None] * table_stride + pair[None, :], mask=turned, other=0.0)
        real = (a * c - b * s).to(x.dtype).to(tl.float32)
        b = (a * s + b * c).to(x.dtype).to(tl.float32)
        a = real
    return a, b


@triton.jit
def _greater(a, b):
    """The larger one, or NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _group_scales(a, b, ROWS: tl.constexpr, D: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr,
                  FLOOR: tl.constexpr):  # fmt: skip
    """Of each group of channels: the scale's byte (NaN where a value is one) and its value [ROWS, D // GROUP]."""
    largest = tl.reshape(_greater(tl.abs(a), tl.abs(b)), [ROWS, D // GROUP, GROUP // 2])
    amax = tl.maximum(tl.reduce(largest, 2, _greater), FLOOR, propagate_nan=tl.PropagateNan.ALL)
    if FORMAT == NVFP4:
        code = e4m3_code(tl.minimum(amax / 6.0, 448.0, propagate_nan=tl.PropagateNan.ALL))
        return code.to(tl.uint8), e4m3_value(code)
    peak: tl.constexpr = 448.0 if FORMAT == FP8 else 6.0
    exponent = pow2_ceil_exponent(amax * (1.0 / peak))
    return exponent.to(tl.uint8), e8m0_value(exponent)


@triton.jit
def _over(value, scale, ROWS: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, EXACT: tl.constexpr):
    """value / scale of its group. EXACT: the scale is a power of two, and so is its inverse."""
    grouped = tl.reshape(value, [ROWS, D // GROUP, GROUP // 2])
    if EXACT:
        bits = scale.to(tl.int32, bitcast=True)
        inverse = e8m0_value(254 - ((bits >> 23) & 255))
        return tl.reshape(grouped * inverse[:, :, None], [ROWS, D // 2])
    # One correction makes the product with the inverse the rounded quotient; an infinite value has no remainder.
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)[:, :, None]
    quotient = grouped * inverse
    rest = tl.fma(-quotient, tl.broadcast_to(scale[:, :, None], quotient.shape), grouped)
    better = tl.fma(rest, tl.broadcast_to(inverse, rest.shape), quotient)
    return tl.reshape(tl.where(rest == rest, better, quotient), [ROWS, D // 2])


@triton.jit
def _insert_rows(
    x, stride, weight, eps, cos, sin, table_stride, slots, pool, stride_page, stride_row, at, here,
    NORM: tl.constexpr, PAIRS: tl.constexpr, FORMAT: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr,
    FLOOR: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, ALIGN: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """Rows `at` of `insert_kernel`."""
    slot = tl.load(slots + at, mask=here, other=-1).to(tl.int64)
    column = tl.arange(0, D)
    value = tl.load(
        x + at[:, None] * stride + column[None, :], mask=here[:, None] & (column < WIDTH)[None, :], other=0.0
    )
    if NORM:
        value = _normed(value, weight, eps, WIDTH, D)
    a, b = _rotated(value, cos, sin, at, table_stride, here, ROWS, WIDTH, D, PAIRS)
    scale_code, scale = _group_scales(a, b, ROWS, D, FORMAT, GROUP, FLOOR)
    EXACT: tl.constexpr = FORMAT != NVFP4
    a = _over(a, scale, ROWS, D, GROUP, EXACT)
    b = _over(b, scale, ROWS, D, GROUP, EXACT)
    base = pool + ((slot // PAGE) * stride_page + (slot % PAGE) * stride_row) * ALIGN
    valid = (slot >= 0)[:, None]
    group = tl.arange(0, D // GROUP)
    g_mask = valid & (group * GROUP < WIDTH)[None, :]
    if FORMAT == FP8:
        code = tl.reshape(tl.join(_fp8_code(a, HARDWARE), _fp8_code(b, HARDWARE)), [ROWS, D])
        tl.store(base[:, None] + column[None, :], code, mask=valid & (column < WIDTH)[None, :])
        tl.store(base[:, None] + WIDTH + group[None, :], scale_code, mask=g_mask)
    else:
        pair = tl.arange(0, D // 2)
        code = (_fp4_code(a) | (_fp4_code(b) << 4)).to(tl.uint8)
        tl.store(base[:, None] + pair[None, :], code, mask=valid & (pair < WIDTH // 2)[None, :])
        tl.store(base[:, None] + WIDTH // 2 + group[None, :], scale_code, mask=g_mask)


@triton.jit
def insert_kernel(
    x, stride, weight, eps, cos, sin, table_stride, slots, pool, stride_page, stride_row, rows,
    NORM: tl.constexpr, PAIRS: tl.constexpr, FORMAT: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr,
    FLOOR: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, ALIGN: tl.constexpr,
    HARDWARE: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Norm (optional), rotate (optional), quantise and write ROWS records; a negative slot writes nothing.

    stride_page and stride_row are in units of ALIGN bytes, so that the compiler sees how wide a store may be.
    """
    begin(PDL)
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    _insert_rows(x, stride, weight, eps, cos, sin, table_stride, slots, pool, stride_page, stride_row, at, at < rows,
                 NORM, PAIRS, FORMAT, PAGE, GROUP, FLOOR, WIDTH, D, ROWS, ALIGN, HARDWARE)  # fmt: skip


@triton.jit
def latent_insert_kernel(
    both, stride, q_weight, latent, kv_weight, eps, cos, sin, table_stride, slots, pool, stride_page, stride_row, rows,
    Q: tl.constexpr, Q_D: tl.constexpr, Q_REST: tl.constexpr, PAIRS: tl.constexpr, FORMAT: tl.constexpr,
    PAGE: tl.constexpr, GROUP: tl.constexpr, FLOOR: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
    ALIGN: tl.constexpr, HARDWARE: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Grid (2 rows,): norms of the first Q channels into `latent`; records of the others."""
    begin(PDL)
    program = tl.program_id(0)
    if program < rows:
        row = program.to(tl.int64)
        _norm_row(both + row * stride, q_weight, latent + row * Q, Q, eps, Q_D, Q_REST)
    else:
        at = (program - rows).to(tl.int64) + tl.arange(0, 1)
        _insert_rows(both + Q, stride, kv_weight, eps, cos, sin, table_stride, slots, pool, stride_page, stride_row, at,
                     at < rows, True, PAIRS, FORMAT, PAGE, GROUP, FLOOR, WIDTH, D, 1, ALIGN, HARDWARE)  # fmt: skip


@triton.jit
def _fp8_value(code, HARDWARE: tl.constexpr):
    """float32 of e4m3 bytes."""
    if HARDWARE:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return e4m3_value(code)


@triton.jit
def _fp4_value(code):
    """float32 of e2m1 codes 0..15: their bits as a float32's lowest exponents, scaled up; subnormals included."""
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.int32).to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def _scaled(value, scale, ROWS: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr):
    return tl.reshape(tl.reshape(value, [ROWS, D // GROUP, GROUP]) * scale[:, :, None], [ROWS, D])


@triton.jit
def gather_kernel(pool, slots, count, pool_slots, out, stride_page, stride_row, PAGE: tl.constexpr,
                  FORMAT: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
                  ALIGN: tl.constexpr, HARDWARE: tl.constexpr, PDL: tl.constexpr = False):  # fmt: skip
    """Decode ROWS records at slots; absent rows become zeros. Strides in units of ALIGN bytes."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + row, mask=row < count, other=-1).to(tl.int64)
    valid = ((slot >= 0) & (slot < pool_slots))[:, None]
    base = (pool + ((slot // PAGE) * stride_page + (slot % PAGE) * stride_row) * ALIGN)[:, None]
    column = tl.arange(0, D)
    group = tl.arange(0, D // GROUP)
    g_mask = valid & (group * GROUP < WIDTH)[None, :]
    if FORMAT == FP8:
        code = tl.load(base + column[None, :], mask=valid & (column < WIDTH)[None, :], other=0)
        scale = e8m0_value(tl.load(base + WIDTH + group[None, :], mask=g_mask, other=0))
        value = _fp8_value(code, HARDWARE)
    else:
        pair = tl.arange(0, D // 2)
        byte = tl.load(base + pair[None, :], mask=valid & (pair < WIDTH // 2)[None, :], other=0).to(tl.int32)
        value = tl.reshape(tl.join(_fp4_value(byte & 15), _fp4_value(byte >> 4)), [ROWS, D])
        scale = tl.load(base + WIDTH // 2 + group[None, :], mask=g_mask, other=0)
        scale = e4m3_value(scale) if FORMAT == NVFP4 else e8m0_value(scale)
    value = tl.where(valid, _scaled(value, scale, ROWS, D, GROUP), 0.0)
    mask = (row < count)[:, None] & (column < WIDTH)[None, :]
    tl.store(out + row[:, None] * WIDTH + column[None, :], value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def rope_round_kernel(
    x, stride_t, stride_h, out, cos, sin, table_stride, heads,
    PAIRS: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, FLOOR: tl.constexpr, WIDTH: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, HARDWARE: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Grid (tokens, head tiles): rotate ROWS vectors and round them to a record's values, as if written and read back."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    here = head < heads
    column = tl.arange(0, D)
    mask = here[:, None] & (column < WIDTH)[None, :]
    value = tl.load(x + token * stride_t + head[:, None] * stride_h + column[None, :], mask=mask, other=0.0)
    at = token + tl.zeros([ROWS], tl.int64)
    a, b = _rotated(value, cos, sin, at, table_stride, here, ROWS, WIDTH, D, PAIRS)
    scale = _group_scales(a, b, ROWS, D, FORMAT, GROUP, FLOOR)[1]
    EXACT: tl.constexpr = FORMAT != NVFP4
    a, b = _over(a, scale, ROWS, D, GROUP, EXACT), _over(b, scale, ROWS, D, GROUP, EXACT)
    if FORMAT == FP8:
        a, b = _fp8_value(_fp8_code(a, HARDWARE), HARDWARE), _fp8_value(_fp8_code(b, HARDWARE), HARDWARE)
    else:
        a, b = _fp4_value(_fp4_code(a)), _fp4_value(_fp4_code(b))
    wide = tl.reshape(tl.join(a, b), [ROWS, D])
    target = out + (token * heads + head[:, None]) * WIDTH + column[None, :]
    tl.store(target, _scaled(wide, scale, ROWS, D, GROUP).to(out.dtype.element_ty), mask=mask)


@triton.jit
def compress_kernel(values, gates, out, width, RATIO: tl.constexpr, D: tl.constexpr, PDL: tl.constexpr = False):
    """Softmax over the RATIO rows of a group, channel by channel."""
    begin(PDL)
    group = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * D + tl.arange(0, D)
    mask = column < width
    if RATIO == 2:
        # All four loads before the first use: none waits for another.
        at = group * 2 * width + column
        first = tl.load(gates + at, mask=mask, other=0.0)
        second = tl.load(gates + at + width, mask=mask, other=0.0)
        one = tl.load(values + at, mask=mask, other=0.0)
        other = tl.load(values + at + width, mask=mask, other=0.0)
        top = tl.maximum(first, second)
        first, second = tl.exp(first - top), tl.exp(second - top)
        total, norm = first * one + second * other, first + second
    else:
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
def engram_gather_kernel(table, scales, rows, count, out, HAS_SCALE: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
                         BR: tl.constexpr, HARDWARE: tl.constexpr, PDL: tl.constexpr = False):  # fmt: skip
    """BR table rows a program: float rows, or e4m3 codes with an E8M0 scale for 32 channels."""
    begin(PDL)
    item = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    row = tl.load(rows + item, mask=item < count, other=0).to(tl.int64)[:, None]
    column = tl.arange(0, D)[None, :]
    here = (item < count)[:, None]
    mask = here & (column < WIDTH)
    if HAS_SCALE:
        GROUPS: tl.constexpr = (WIDTH + 31) // 32
        group = tl.arange(0, D // 32)[None, :]
        code = tl.load(table + row * WIDTH + column, mask=mask, other=0)
        scale = e8m0_value(tl.load(scales + row * GROUPS + group, mask=here & (group < GROUPS), other=127))
        value = _scaled(_fp8_value(code, HARDWARE), scale, BR, D, 32)
    else:
        value = tl.load(table + row * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + item[:, None] * WIDTH + column, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def insert_v4_kernel(
    x, stride, weight, eps, cos, sin, table_stride, slots, pool, stride_page, rows,
    NORM: tl.constexpr, PAIRS: tl.constexpr, PAGE: tl.constexpr, FLOOR: tl.constexpr, ROWS: tl.constexpr,
    ALIGN: tl.constexpr, HARDWARE: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """`insert_kernel` for V4's planar record: 448 e4m3, 64 bfloat16; after the page's rows 8 scale bytes a row, 7 used."""
    begin(PDL)
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = at < rows
    slot = tl.load(slots + at, mask=here, other=-1).to(tl.int64)
    column = tl.arange(0, 512)
    value = tl.load(x + at[:, None] * stride + column[None, :], mask=here[:, None], other=0.0)
    if NORM:
        value = _normed(value, weight, eps, 512, 512)
    a, b = _rotated(value, cos, sin, at, table_stride, here, ROWS, 512, 512, PAIRS)
    scale_code, scale = _group_scales(a, b, ROWS, 512, FP8, 64, FLOOR)
    page = pool + (slot // PAGE) * stride_page * ALIGN
    base = page + (slot % PAGE) * 576
    valid = (slot >= 0)[:, None]
    low, high = _over(a, scale, ROWS, 512, 64, True), _over(b, scale, ROWS, 512, 64, True)
    code = tl.reshape(tl.join(_fp8_code(low, HARDWARE), _fp8_code(high, HARDWARE)), [ROWS, 512])
    tl.store(base[:, None] + column[None, :], code, mask=valid & (column < 448)[None, :])
    plain = tl.reshape(tl.join(a, b), [ROWS, 512]).to(tl.bfloat16)
    tail = (base + 448).to(tl.pointer_type(tl.bfloat16))
    tl.store(tail[:, None] + (column - 448)[None, :], plain, mask=valid & (column >= 448)[None, :])
    group = tl.arange(0, 8)
    scales = page + PAGE * 576 + (slot % PAGE) * 8
    tl.store(scales[:, None] + group[None, :], tl.where(group[None, :] < 7, scale_code, 0).to(tl.uint8), mask=valid)


@triton.jit
def gather_v4_kernel(pool, slots, count, pool_slots, out, stride_page, PAGE: tl.constexpr, ROWS: tl.constexpr,
                     ALIGN: tl.constexpr, HARDWARE: tl.constexpr, PDL: tl.constexpr = False):  # fmt: skip
    """Decode ROWS planar records at slots; absent rows become zeros."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + row, mask=row < count, other=-1).to(tl.int64)
    valid = ((slot >= 0) & (slot < pool_slots))[:, None]
    page = pool + (slot // PAGE) * stride_page * ALIGN
    base = page + (slot % PAGE) * 576
    column = tl.arange(0, 512)
    group = tl.arange(0, 8)
    code = tl.load(base[:, None] + column[None, :], mask=valid & (column < 448)[None, :], other=0)
    scales = page + PAGE * 576 + (slot % PAGE) * 8
    scale = e8m0_value(tl.load(scales[:, None] + group[None, :], mask=valid & (group < 7)[None, :], other=127))
    tail = (base + 448).to(tl.pointer_type(tl.bfloat16))
    plain = tl.load(tail[:, None] + (column - 448)[None, :], mask=valid & (column >= 448)[None, :], other=0.0).to(
        tl.float32
    )
    value = tl.where((column < 448)[None, :], _scaled(_fp8_value(code, HARDWARE), scale, ROWS, 512, 64), plain)
    target = out + row[:, None] * 512 + column[None, :]
    tl.store(target, tl.where(valid, value, 0.0).to(out.dtype.element_ty), mask=(row < count)[:, None])
