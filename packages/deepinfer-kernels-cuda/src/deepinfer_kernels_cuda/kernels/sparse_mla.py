# The kernel language is no Python that a type checker knows.
# pyrefly: ignore-errors
"""Sparse MLA over records or over a bfloat16 workspace, one program a (query, block of heads)."""

from __future__ import annotations

import triton
import triton.language as tl

from .decode_formats import FP8, NVFP4, load_record


@triton.jit
def _tile_update(q, keys, valid, acc, m, total, scale_log2):
    """One online-softmax step over keys [BN, D] (K = V)."""
    logits = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale_log2
    logits = tl.where(valid[None, :], logits, float("-inf"))
    m_new = tl.maximum(m, tl.max(logits, 1))
    # A row without any key so far has m = -inf; exp2(-inf - -inf) would be NaN.
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(logits - m_safe[:, None])
    alpha = tl.exp2(m - m_safe)
    total = total * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(keys.dtype), keys, acc * alpha[:, None], input_precision="ieee")
    return acc, m_new, total


@triton.jit
def _write_result(acc, m, total, sink, out, out_stride_n, out_stride_h, lse, query, head, channel, heads,
                  CHANNELS: tl.constexpr, HAS_SINK: tl.constexpr):  # fmt: skip
    m_safe = tl.where(m == float("-inf"), 0.0, m)
    norm = total
    if HAS_SINK:
        value = tl.load(sink + head, mask=head < heads, other=float("-inf")).to(tl.float32) * 1.4426950408889634
        norm = total + tl.exp2(value - m_safe)
    inverse = tl.where(total > 0.0, 1.0 / norm, 0.0)
    result = acc * inverse[:, None]
    target = out + query.to(tl.int64) * out_stride_n + head[:, None] * out_stride_h + channel[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=(head < heads)[:, None] & (channel < CHANNELS)[None, :])
    log_total = tl.where(total > 0.0, (m_safe + tl.log2(total)) * 0.6931471805599453, float("inf"))
    tl.store(lse + query.to(tl.int64) * heads + head, log_total, mask=head < heads)


@triton.jit
def sparse_mla_kernel(
    q, q_stride_n, q_stride_h,
    window, window_idx, w_stride_page, w_stride_row, w_idx_stride, W_KEYS, w_slots,
    extra, extra_idx, x_stride_page, x_stride_row, x_idx_stride, X_KEYS, x_slots,
    sink, out, out_stride_n, out_stride_h, lse, heads, scale_log2,
    W_PAGE: tl.constexpr, X_PAGE: tl.constexpr, HAS_SINK: tl.constexpr,
    CHANNELS: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Grid (queries, head blocks). Window records are fp8, extra records nvfp4."""
    query = tl.program_id(0)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    channel = tl.arange(0, D)
    q_ptr = q + query.to(tl.int64) * q_stride_n + head[:, None] * q_stride_h + channel[None, :]
    q_tile = tl.load(q_ptr, mask=(head < heads)[:, None] & (channel < CHANNELS)[None, :], other=0.0)
    acc = tl.zeros([BH, D], tl.float32)
    m = tl.full([BH], float("-inf"), tl.float32)
    total = tl.zeros([BH], tl.float32)
    for begin in range(0, W_KEYS, BN):
        key = begin + tl.arange(0, BN)
        slot = tl.load(window_idx + query.to(tl.int64) * w_idx_stride + key, mask=key < W_KEYS, other=-1).to(tl.int64)
        valid = (slot >= 0) & (slot < w_slots)
        base = (slot // W_PAGE) * w_stride_page + (slot % W_PAGE) * w_stride_row
        keys = load_record(window, base[:, None], valid[:, None], channel[None, :], CHANNELS, FP8).to(q_tile.dtype)
        acc, m, total = _tile_update(q_tile, keys, valid, acc, m, total, scale_log2)
    for begin in range(0, X_KEYS, BN):
        key = begin + tl.arange(0, BN)
        slot = tl.load(extra_idx + query.to(tl.int64) * x_idx_stride + key, mask=key < X_KEYS, other=-1).to(tl.int64)
        valid = (slot >= 0) & (slot < x_slots)
        base = (slot // X_PAGE) * x_stride_page + (slot % X_PAGE) * x_stride_row
        keys = load_record(extra, base[:, None], valid[:, None], channel[None, :], CHANNELS, NVFP4).to(q_tile.dtype)
        acc, m, total = _tile_update(q_tile, keys, valid, acc, m, total, scale_log2)
    _write_result(acc, m, total, sink, out, out_stride_n, out_stride_h, lse, query, head, channel, heads, CHANNELS,
                  HAS_SINK)  # fmt: skip


@triton.jit
def sparse_mla_workspace_kernel(
    q, q_stride_n, q_stride_h, kv, kv_stride, kv_rows, indices, idx_stride, KEYS,
    sink, out, out_stride_n, out_stride_h, lse, heads, scale_log2, HAS_SINK: tl.constexpr,
    CHANNELS: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Grid (queries, head blocks): keys are rows of a dense workspace."""
    query = tl.program_id(0)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    channel = tl.arange(0, D)
    q_ptr = q + query.to(tl.int64) * q_stride_n + head[:, None] * q_stride_h + channel[None, :]
    q_tile = tl.load(q_ptr, mask=(head < heads)[:, None] & (channel < CHANNELS)[None, :], other=0.0)
    acc = tl.zeros([BH, D], tl.float32)
    m = tl.full([BH], float("-inf"), tl.float32)
    total = tl.zeros([BH], tl.float32)
    for begin in range(0, KEYS, BN):
        key = begin + tl.arange(0, BN)
        row = tl.load(indices + query.to(tl.int64) * idx_stride + key, mask=key < KEYS, other=-1).to(tl.int64)
        valid = (row >= 0) & (row < kv_rows)
        mask = valid[:, None] & (channel < CHANNELS)[None, :]
        keys = tl.load(kv + (row * kv_stride)[:, None] + channel[None, :], mask=mask, other=0.0).to(q_tile.dtype)
        acc, m, total = _tile_update(q_tile, keys, valid, acc, m, total, scale_log2)
    _write_result(acc, m, total, sink, out, out_stride_n, out_stride_h, lse, query, head, channel, heads, CHANNELS,
                  HAS_SINK)  # fmt: skip
