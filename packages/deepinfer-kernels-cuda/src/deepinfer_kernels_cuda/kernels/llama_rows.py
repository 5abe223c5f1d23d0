# The kernel language is no Python that a type checker knows.
# pyrefly: ignore-errors
"""Row kernels of Llama-class layers: cache slots, RMS norm, rotation with cache insert, SwiGLU."""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import begin


@triton.jit
def cache_slots_kernel(query_starts, seq_lens, write_floors, table, table_stride, slots, BLOCK: tl.constexpr,
                       PDL: tl.constexpr = False):  # fmt: skip
    """Grid (sequences,) of at most a token each: its flat cache slot, -1 below the sequence's write floor."""
    begin(PDL)
    sequence = tl.program_id(0)
    start = tl.load(query_starts + sequence)
    position = tl.load(seq_lens + sequence) - 1
    page = tl.load(table + sequence.to(tl.int64) * table_stride + position // BLOCK).to(tl.int64)
    slot = tl.where(position >= tl.load(write_floors + sequence), page * BLOCK + position % BLOCK, -1)
    tl.store(slots + start, slot, mask=tl.load(query_starts + sequence + 1) > start)


@triton.jit
def llama_norm_kernel(
    x, stride, weight, out, out_stride, rows, width, eps, D: tl.constexpr, BR: tl.constexpr, PDL: tl.constexpr = False
):
    """weight * round(x / rms(x)), the inner rounding to x's dtype; BR rows a program."""
    begin(PDL)
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    channel = tl.arange(0, D)
    mask = (row < rows)[:, None] & (channel < width)[None, :]
    r64 = row.to(tl.int64)[:, None]
    value = tl.load(x + r64 * stride + channel[None, :], mask=mask, other=0.0)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / width + eps)
    inner = (wide * scale[:, None]).to(value.dtype).to(tl.float32)
    gain = tl.load(weight + channel, mask=channel < width, other=0.0).to(tl.float32)
    tl.store(out + r64 * out_stride + channel[None, :], (inner * gain[None, :]).to(value.dtype), mask=mask)


@triton.jit
def rope_insert_kernel(
    qkv, stride, rope, positions, slots, keys, values, k_stride_b, k_stride_r, k_stride_h, v_stride_b, v_stride_r,
    v_stride_h, q_norm, k_norm, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr, BH: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Grid (tokens, head tiles): norm and rotate queries in place, norm, rotate and store keys, store values."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    pair = tl.arange(0, PAIRS)
    inside = pair < HALF
    mask = (head < HEADS + 2 * KV_HEADS)[:, None] & inside[None, :]
    place = qkv + token * stride + head[:, None] * (2 * HALF) + pair[None, :]
    low = tl.load(place, mask=mask, other=0.0)
    high = tl.load(place + HALF, mask=mask, other=0.0)
    first, second = low.to(tl.float32), high.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[:, None]
        is_query = (head < HEADS)[:, None]
        gain_low = tl.where(is_query, tl.load(q_norm + pair, mask=inside, other=0.0).to(tl.float32)[None, :],
                            tl.load(k_norm + pair, mask=inside, other=0.0).to(tl.float32)[None, :])  # fmt: skip
        gain_high = tl.where(is_query, tl.load(q_norm + HALF + pair, mask=inside, other=0.0).to(tl.float32)[None, :],
                             tl.load(k_norm + HALF + pair, mask=inside, other=0.0).to(tl.float32)[None, :])  # fmt: skip
        first = ((first * scale).to(low.dtype).to(tl.float32) * gain_low).to(low.dtype).to(tl.float32)
        second = ((second * scale).to(low.dtype).to(tl.float32) * gain_high).to(low.dtype).to(tl.float32)
    position = tl.load(positions + token).to(tl.int64)
    cos = tl.load(rope + position * (2 * HALF) + pair, mask=inside, other=0.0)[None, :]
    sin = tl.load(rope + position * (2 * HALF) + HALF + pair, mask=inside, other=0.0)[None, :]
    turned_low = (first * cos - second * sin).to(low.dtype)
    turned_high = (second * cos + first * sin).to(low.dtype)
    query = mask & (head < HEADS)[:, None]
    tl.store(place, turned_low, mask=query)
    tl.store(place + HALF, turned_high, mask=query)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        page, inner = slot // BLOCK, slot % BLOCK
        key_head = head - HEADS
        is_key = mask & ((head >= HEADS) & (head < HEADS + KV_HEADS))[:, None]
        target = keys + page * k_stride_b + inner * k_stride_r + key_head[:, None] * k_stride_h + pair[None, :]
        tl.store(target, turned_low, mask=is_key)
        tl.store(target + HALF, turned_high, mask=is_key)
        value_head = head - HEADS - KV_HEADS
        is_value = mask & (head >= HEADS + KV_HEADS)[:, None]
        target = values + page * v_stride_b + inner * v_stride_r + value_head[:, None] * v_stride_h + pair[None, :]
        tl.store(target, low, mask=is_value)
        tl.store(target + HALF, high, mask=is_value)


@triton.jit
def silu_mul_kernel(gate_up, stride, out, out_stride, width, BLOCK: tl.constexpr, PDL: tl.constexpr = False):
    """round(silu(gate)) * up; grid (rows, channel tiles)."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < width
    gate = tl.load(gate_up + row * stride + channel, mask=mask, other=0.0)
    up = tl.load(gate_up + row * stride + width + channel, mask=mask, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out + row * out_stride + channel, (activated * up).to(gate.dtype), mask=mask)


@triton.jit
def argmax_kernel(
    logits, stride, out, flat, where, vocab, HAS_TARGET: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr = False
):
    """The lowest index of each row's maximum, into out[row] and, with HAS_TARGET, int32 into flat[where[row]]."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    index = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(logits + row * stride + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
        better = value > best
        best = tl.where(better, value, best)
        index = tl.where(better, column, index)
    top = tl.max(best, 0)
    found = tl.min(tl.where(best == top, index, vocab), 0)
    found = tl.where(found < vocab, found, 0)
    tl.store(out + row, found.to(tl.int64))
    if HAS_TARGET:
        tl.store(flat + tl.load(where + row).to(tl.int64), found)
