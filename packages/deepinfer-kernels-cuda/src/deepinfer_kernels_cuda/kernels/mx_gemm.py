# The kernel language is no Python that a type checker knows.
# pyrefly: ignore-errors
"""Microscaled GEMM over weights as stored, and the grouping of tokens by expert."""

from __future__ import annotations

import triton
import triton.language as tl

from .decode_formats import e2m1_value, e4m3_value, e8m0_value
from .dependent import begin


@triton.jit
def _weight_tile(codes, scales, row, column, row_mask, K, FP4: tl.constexpr):
    """float32 [BN, BK] of natural weights."""
    mask = row_mask[:, None] & (column < K)[None, :]
    groups = (K + 31) // 32
    scale = e8m0_value(tl.load(scales + row[:, None] * groups + column[None, :] // 32, mask=mask, other=127))
    if FP4:
        byte = tl.load(codes + row[:, None] * (K // 2) + column[None, :] // 2, mask=mask, other=0).to(tl.int32)
        value = e2m1_value((byte >> ((column & 1) * 4)[None, :]) & 15)
    else:
        value = e4m3_value(tl.load(codes + row[:, None] * K + column[None, :], mask=mask, other=0))
    return value * scale


@triton.jit
def mx_gemm_kernel(
    x, x_stride, codes, scales, out, out_stride, order, offsets, N, K, rows, top_k,
    FP4: tl.constexpr, GROUPED: tl.constexpr, GATHER: tl.constexpr, SCATTER: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[row] = x[row] @ W^T. Grid (ceil(N / BN), experts or 1, token tiles)."""
    expert = tl.program_id(1).to(tl.int64)
    if GROUPED:
        row_begin = tl.load(offsets + expert)
        row_end = tl.load(offsets + expert + 1)
    else:
        row_begin = 0
        row_end = rows
    codes += expert * N * (K // 2 if FP4 else K)
    scales += expert * N * ((K + 31) // 32)
    n = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    for tile in range(tl.program_id(2), tl.cdiv(row_end - row_begin, BT), tl.num_programs(2)):
        row = row_begin + tile * BT + tl.arange(0, BT)
        row_mask = row < row_end
        x_row = row.to(tl.int64)
        if GATHER:
            x_row = (tl.load(order + row, mask=row_mask, other=0) // top_k).to(tl.int64)
        acc = tl.zeros([BT, BN], tl.float32)
        for start in range(0, K, BK):
            column = start + tl.arange(0, BK)
            x_mask = row_mask[:, None] & (column < K)[None, :]
            tile_x = tl.load(x + x_row[:, None] * x_stride + column[None, :], mask=x_mask, other=0.0)
            tile_w = _weight_tile(codes, scales, n, column, n < N, K, FP4).to(tile_x.dtype)
            acc = tl.dot(tile_x, tl.trans(tile_w), acc, input_precision="ieee")
        o_row = row
        if SCATTER:
            o_row = tl.load(order + row, mask=row_mask, other=0)
        target = out + o_row.to(tl.int64)[:, None] * out_stride + n[None, :]
        tl.store(target, acc.to(out.dtype.element_ty), mask=row_mask[:, None] & (n < N)[None, :])


@triton.jit
def clamped_swiglu_kernel(both, out, order, pair_weights, width, limit, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """silu(min(gate, limit)) * clip(up, -limit, limit) (* routing weight), one row a program; gate columns first."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate = tl.load(both + row * 2 * width + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * width + width + column, mask=mask, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    value = gate / (1.0 + tl.exp(-gate)) * up
    if WEIGHTED:
        value = value * tl.load(pair_weights + tl.load(order + row))
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def group_pairs_kernel(ids, pairs, order, offsets, experts, BLOCK: tl.constexpr, PDL: tl.constexpr = False):
    """One program an expert: where its pairs begin, and their positions in ascending order. Negative ids are dropped."""
    begin(PDL)
    expert = tl.program_id(0)
    below = tl.zeros([BLOCK], tl.int32)
    all_pairs = tl.zeros([BLOCK], tl.int32)
    for start in range(0, pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        own = tl.load(ids + pair, mask=pair < pairs, other=-1).to(tl.int32)
        below += ((own >= 0) & (own < expert)).to(tl.int32)
        all_pairs += (own >= 0).to(tl.int32)
    base = tl.sum(below, 0)
    tl.store(offsets + expert, base)
    if expert == experts - 1:
        tl.store(offsets + experts, tl.sum(all_pairs, 0))
    for start in range(0, pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        own = tl.load(ids + pair, mask=pair < pairs, other=-1).to(tl.int32)
        mine = own == expert
        rank = tl.cumsum(mine.to(tl.int32), 0)
        tl.store(order + base + rank - 1, pair, mask=mine)
        base += tl.sum(mine.to(tl.int32), 0)


@triton.jit
def combine_kernel(parts, ids, shared, out, out_stride, width, TOP_K: tl.constexpr, HAS_SHARED: tl.constexpr,
                   BLOCK: tl.constexpr, PDL: tl.constexpr = False):  # fmt: skip
    """out[t] = sum_j parts[t * TOP_K + j] (+ shared[t]) in float32, in the order of j; pairs with id < 0 are skipped."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        present = tl.load(ids + token * TOP_K + j) >= 0
        total += tl.load(parts + (token * TOP_K + j) * width + column, mask=mask & present, other=0.0).to(tl.float32)
    if HAS_SHARED:
        # The routed sum is rounded first, as when the two are separate tensors.
        total = total.to(out.dtype.element_ty).to(tl.float32)
        total += tl.load(shared + token * width + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * out_stride + column, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def sum_splits_kernel(
    parts, out, out_stride, rows, width, SPLITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr = False
):
    """out[row] = sum_s parts[s, row], float32, in order."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for s in tl.static_range(SPLITS):
        total += tl.load(parts + (s * rows + row) * width + column, mask=mask, other=0.0)
    tl.store(out + row * out_stride + column, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def dequantize_kernel(codes, scales, out, N, K, FP4: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Natural weights to dense [N, K]."""
    row = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    column = tl.program_id(1) * BK + tl.arange(0, BK)
    value = _weight_tile(codes, scales, row, column, row < N, K, FP4)
    mask = (row < N)[:, None] & (column < K)[None, :]
    tl.store(out + row[:, None] * K + column[None, :], value.to(out.dtype.element_ty), mask=mask)
