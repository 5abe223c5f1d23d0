# The kernel language is no Python that a type checker knows.
# pyrefly: ignore-errors
"""Dense products of small layers with what surrounds them: norm before; residual or SwiGLU after."""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import begin


@triton.jit
def _prefetch(rows, K: tl.constexpr, LINE: tl.constexpr, LINES: tl.constexpr):
    """Ask for whole rows of a matrix (pointers to their first elements) to come to the L2 cache; LINE elements a cache line."""
    line = tl.minimum(tl.arange(0, LINES) * LINE, K - 1)
    place = (rows[:, None] + line[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [place], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["rows", "parts"])
def dense_linear_kernel(
    x, x_stride, weight, w_stride, norm_weight, eps, squares_in, residual, residual_stride, out, out_stride, next_weight,
    scaled, squares_out, rows, parts,
    N: tl.constexpr, K: tl.constexpr, NORM: tl.constexpr, SWIGLU: tl.constexpr, ADD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, LINE: tl.constexpr, LINES: tl.constexpr,
    PARTS: tl.constexpr, SCALE: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Grid (row tiles, tiles of N outputs).

    NORM 1: normalise as a norm of its own would; 2: weigh channels, scale rows after the product; 3: channels are weighed
    already, and sums of squares [rows, parts] are there for the scale. SCALE leaves both for the next product. With
    SWIGLU the weight has 2 N rows, gates first.
    """
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    channel = tl.arange(0, BK)
    # Rows and columns past the end repeat the last one; they are not stored.
    x_row = x + tl.minimum(row, rows - 1).to(tl.int64) * x_stride
    w_row = weight + tl.minimum(column, N - 1).to(tl.int64) * w_stride
    u_row = w_row + N * w_stride
    if PDL:  # noqa: SIM102 - decided when the kernel is compiled
        if tl.program_id(0) == 0:
            _prefetch(w_row, K, LINE, LINES)
            if SWIGLU:
                _prefetch(u_row, K, LINE, LINES)
    if NORM == 1 or NORM == 2:
        # Read a tile ahead: a load of so few bytes is not pipelined by the compiler.
        gain = tl.load(norm_weight + channel, mask=channel < K, other=0.0)
    begin(PDL)
    if NORM == 1:
        squares = tl.zeros([BM, BK], tl.float32)
        for k in tl.static_range(0, K, BK):
            value = tl.load(x_row[:, None] + (k + channel)[None, :], mask=(k + channel < K)[None, :], other=0.0)
            squares += value.to(tl.float32) * value.to(tl.float32)
        scale = tl.rsqrt(tl.sum(squares, 1) / K + eps)
    if NORM == 2:
        squares = tl.zeros([BM, BK], tl.float32)
    if NORM == 3:
        part = tl.arange(0, PARTS)
        place = squares_in + tl.minimum(row, rows - 1)[:, None] * parts + part[None, :]
        squares = tl.load(place, mask=(part < parts)[None, :], other=0.0)
    acc = tl.zeros([BM, BN], tl.float32)
    if SWIGLU:
        acc_up = tl.zeros([BM, BN], tl.float32)
    x_tile = x_row[:, None] + channel[None, :]
    w_tile = w_row[None, :] + channel[:, None]
    u_tile = u_row[None, :] + channel[:, None]
    for k in range(0, K, BK):
        if K % BK == 0:
            a = tl.load(x_tile + k)
            w = tl.load(w_tile + k)
            if SWIGLU:
                u = tl.load(u_tile + k)
        else:
            inside = k + channel < K
            a = tl.load(x_tile + k, mask=inside[None, :], other=0.0)
            w = tl.load(w_tile + k, mask=inside[:, None], other=0.0)
            if SWIGLU:
                u = tl.load(u_tile + k, mask=inside[:, None], other=0.0)
        if NORM == 1:
            wide = (a.to(tl.float32) * scale[:, None]).to(a.dtype).to(tl.float32)
            a = (wide * gain.to(tl.float32)[None, :]).to(a.dtype)
        if NORM == 2:
            wide = a.to(tl.float32)
            squares += wide * wide
            a = (wide * gain.to(tl.float32)[None, :]).to(a.dtype)
        if NORM == 1 or NORM == 2:
            ahead = k + BK + channel
            gain = tl.load(norm_weight + ahead, mask=ahead < K, other=0.0)
        acc = tl.dot(a, w, acc, input_precision="ieee")
        if SWIGLU:
            acc_up = tl.dot(a, u, acc_up, input_precision="ieee")
    if NORM >= 2:
        scale = tl.rsqrt(tl.sum(squares, 1) / K + eps)
        acc = acc * scale[:, None]
        if SWIGLU:
            acc_up = acc_up * scale[:, None]
    kind = out.dtype.element_ty
    mask = (row < rows)[:, None] & (column < N)[None, :]
    r64 = row.to(tl.int64)[:, None]
    if SWIGLU:
        gate = acc.to(kind).to(tl.float32)
        acc = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32) * acc_up.to(kind).to(tl.float32)
    if ADD:
        acc += tl.load(residual + r64 * residual_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    result = acc.to(kind)
    tl.store(out + r64 * out_stride + column[None, :], result, mask=mask)
    if SCALE:
        wide = tl.where(mask, result.to(tl.float32), 0.0)
        tl.store(squares_out + row * tl.num_programs(1) + tl.program_id(1), tl.sum(wide * wide, 1), mask=row < rows)
        factor = tl.load(next_weight + column, mask=column < N, other=0.0).to(tl.float32)
        tl.store(scaled + r64 * N + column[None, :], (wide * factor[None, :]).to(kind), mask=mask)
