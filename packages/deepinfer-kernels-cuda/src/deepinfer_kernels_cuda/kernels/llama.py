# The kernel language is no Python that a type checker knows.
# pyrefly: ignore-errors
"""Paged grouped-query attention, the Markov step."""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import begin


@triton.jit
def _insert(q, q_stride_h, heads, kv_heads, kv_head, slot, cos, sin, other, keys, values, k_stride_b, k_stride_r, k_stride_h,
            v_stride_b, v_stride_r, v_stride_h, BLOCK: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """Rotate a token's key of one head, and write it and its value to their slot."""
    channel = tl.arange(0, D)
    inside = channel < WIDTH
    key = q + (heads + kv_head) * q_stride_h
    near = tl.load(key + channel, mask=inside, other=0.0)
    far = tl.load(key + other, mask=inside, other=0.0)
    value = tl.load(key + kv_heads * q_stride_h + channel, mask=inside, other=0.0)
    turned = (near.to(tl.float32) * cos + far.to(tl.float32) * sin).to(near.dtype)
    page, inner = slot // BLOCK, slot % BLOCK
    tl.store(keys + page * k_stride_b + inner * k_stride_r + kv_head * k_stride_h + channel, turned, mask=inside)
    tl.store(values + page * v_stride_b + inner * v_stride_r + kv_head * v_stride_h + channel, value, mask=inside)


@triton.jit
def _merge(partial, lse, out, out_stride_t, out_stride_h, start, tile, count, kv_head, heads, used,
           splits, GROUP: tl.constexpr, BQ: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
           D: tl.constexpr, S: tl.constexpr):  # fmt: skip
    """Sum the `used` parts of a tile's rows by their log2 weights, in order."""
    row = tl.arange(0, ROWS)
    token = tile * BQ + row // GROUP
    here = (row < QUERIES * GROUP) & (token < count)
    head = kv_head * GROUP + row % GROUP
    t64 = (start + token).to(tl.int64)
    split = tl.arange(0, S)
    channel = tl.arange(0, D)
    item = (t64 * heads + head)[None, :] * splits + split[:, None]
    mask = here[None, :] & (split < used)[:, None]
    part = tl.load(partial + item[:, :, None] * WIDTH + channel[None, None, :],
                   mask=mask[:, :, None] & (channel < WIDTH)[None, None, :], other=0.0)  # fmt: skip
    weight = tl.load(lse + item, mask=mask, other=float("-inf"))
    top = tl.max(weight, 0)
    weight = tl.exp2(weight - tl.where(top == float("-inf"), 0.0, top)[None, :])
    weight = weight / tl.maximum(tl.sum(weight, 0), 1e-30)[None, :]
    result = tl.sum(part * weight[:, :, None], 0)
    target = out + t64[:, None] * out_stride_t + head[:, None] * out_stride_h + channel[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=here[:, None] & (channel < WIDTH)[None, :])


@triton.jit(do_not_specialize=["splits", "table_stride"])
def paged_gqa_kernel(
    q, q_stride_t, q_stride_h, keys, values, k_stride_b, k_stride_r, k_stride_h, v_stride_b, v_stride_r, v_stride_h,
    table, table_stride, table_rows, query_starts, seq_lens, rope, slots, out, out_stride_t, out_stride_h, partial, lse,
    arrived, scale_log2, splits,
    GROUP: tl.constexpr, M: tl.constexpr, BQ: tl.constexpr, BLOCK: tl.constexpr, BN: tl.constexpr,
    WIDTH: tl.constexpr, D: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, S: tl.constexpr, LEAST: tl.constexpr,
    INSERT: tl.constexpr, AHEAD: tl.constexpr, FULL: tl.constexpr = False, PDL: tl.constexpr = False,
):  # fmt: skip
    """Grid (query tiles * splits, kv heads, sequences), splits <= S. A tile's M rows are BQ tokens x GROUP heads of a kv head.

    A split takes at least LEAST blocks of BN keys. The last one to arrive sums up what all have left. INSERT: sequences have
    one token, q is followed by its keys and values; queries and key are rotated, key and value written to their slot. AHEAD reads
    pages a step ahead, so that keys and values are on their way early; it takes registers. FULL, without AHEAD: blocks of keys
    that every query of the tile sees come in a loop of their own, without masks.
    """
    begin(PDL)
    tile, split = tl.program_id(0), 0
    if S > 1:
        tile, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    kv_head = tl.program_id(1)
    sequence = tl.program_id(2)
    heads = tl.num_programs(1) * GROUP
    start = tl.load(query_starts + sequence)
    count = tl.load(query_starts + sequence + 1) - start
    length = tl.load(seq_lens + sequence)
    last = tl.minimum(length - count + (tile + 1) * BQ, length)
    blocks = tl.cdiv(last, BN)
    used = 1
    if S > 1:
        used = tl.maximum(tl.minimum(tl.cdiv(blocks, LEAST), splits), 1)
    if (tile * BQ < count) & (split < used):
        table_row = table + tl.load(table_rows + sequence).to(tl.int64) * table_stride
        first, end = blocks * split // used, blocks * (split + 1) // used
        if AHEAD:
            key = first * BN + tl.arange(0, BN)
            page = tl.load(table_row + key // BLOCK, mask=key < last, other=0)
        row = tl.arange(0, M)
        token = tile * BQ + row // GROUP
        here = (token < count) & (row < BQ * GROUP)
        position = length - count + token
        channel = tl.arange(0, D)
        head = kv_head * GROUP + row % GROUP
        t64 = (start + token).to(tl.int64)
        q_row = q + t64[:, None] * q_stride_t + head[:, None] * q_stride_h
        q_mask = here[:, None] & (channel < WIDTH)[None, :]
        q_tile = tl.load(q_row + channel[None, :], mask=q_mask, other=0.0)
        if INSERT:
            low = channel < WIDTH // 2
            other = tl.where(low, channel + WIDTH // 2, channel - WIDTH // 2)
            angle = rope + (length - 1).to(tl.int64) * WIDTH + tl.where(low, channel, other)
            cos = tl.load(angle, mask=channel < WIDTH, other=0.0)
            sin = tl.load(angle + WIDTH // 2, mask=channel < WIDTH, other=0.0)
            sin = tl.where(low, -sin, sin)
            far = tl.load(q_row + other[None, :], mask=q_mask, other=0.0)
            q_tile = (q_tile.to(tl.float32) * cos[None, :] + far.to(tl.float32) * sin[None, :]).to(q_tile.dtype)
            if split == used - 1:
                slot = tl.load(slots + start)
                if slot >= 0:
                    _insert(q + start.to(tl.int64) * q_stride_t, q_stride_h, heads, tl.num_programs(1), kv_head, slot, cos,
                            sin, other, keys, values, k_stride_b, k_stride_r, k_stride_h, v_stride_b, v_stride_r,
                            v_stride_h, BLOCK, WIDTH, D)  # fmt: skip
                tl.debug_barrier()  # the loop reads what this block's threads have written
        m = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, D], tl.float32)
        if FULL:
            full = tl.minimum(tl.maximum((length - count + tile * BQ + 1) // BN, first), end)
            for block in range(first, full):
                key = block * BN + tl.arange(0, BN)
                page = tl.load(table_row + key // BLOCK)
                inner = (key % BLOCK).to(tl.int64)
                p64 = page.to(tl.int64)
                k_ptr = (
                    keys + (p64 * k_stride_b + inner * k_stride_r)[:, None] + kv_head * k_stride_h + channel[None, :]
                )
                v_ptr = (
                    values + (p64 * v_stride_b + inner * v_stride_r)[:, None] + kv_head * v_stride_h + channel[None, :]
                )
                if WIDTH == D:
                    k_tile = tl.load(k_ptr)
                    v_tile = tl.load(v_ptr)
                else:
                    k_tile = tl.load(k_ptr, mask=(channel < WIDTH)[None, :], other=0.0)
                    v_tile = tl.load(v_ptr, mask=(channel < WIDTH)[None, :], other=0.0)
                logits = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale_log2
                m_new = tl.maximum(m, tl.max(logits, 1))
                p = tl.exp2(logits - m_new[:, None])
                alpha = tl.exp2(m - m_new)
                total = total * alpha + tl.sum(p, 1)
                acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision="ieee")
                m = m_new
            first = full
        for block in range(first, end):
            if not AHEAD:
                key = block * BN + tl.arange(0, BN)
            seen = key < last
            if AHEAD:
                ahead = tl.load(table_row + (key + BN) // BLOCK, mask=key + BN < last, other=0)
            else:
                page = tl.load(table_row + key // BLOCK, mask=seen, other=0)
            inner = (key % BLOCK).to(tl.int64)
            mask = seen[:, None] & (channel < WIDTH)[None, :]
            p64 = page.to(tl.int64)
            k_ptr = keys + (p64 * k_stride_b + inner * k_stride_r)[:, None] + kv_head * k_stride_h + channel[None, :]
            v_ptr = values + (p64 * v_stride_b + inner * v_stride_r)[:, None] + kv_head * v_stride_h + channel[None, :]
            k_tile = tl.load(k_ptr, mask=mask, other=0.0)
            v_tile = tl.load(v_ptr, mask=mask, other=0.0)
            logits = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale_log2
            logits = tl.where(key[None, :] <= position[:, None], logits, float("-inf"))
            m_new = tl.maximum(m, tl.max(logits, 1))
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.exp2(logits - m_safe[:, None])
            alpha = tl.exp2(m - m_safe)
            total = total * alpha + tl.sum(p, 1)
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision="ieee")
            m = m_new
            if AHEAD:
                key += BN
                page = ahead
        result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        if used == 1:
            target = out + t64[:, None] * out_stride_t + head[:, None] * out_stride_h + channel[None, :]
            tl.store(target, result.to(out.dtype.element_ty), mask=q_mask)
        elif S > 1:
            item = (t64 * heads + head) * splits + split
            tl.store(partial + item[:, None] * WIDTH + channel[None, :], result, mask=q_mask)
            tl.store(lse + item, tl.where(total > 0.0, m + tl.log2(total), float("-inf")), mask=here)
            tl.debug_barrier()
            tiles = tl.num_programs(0) // splits
            counter = arrived + (sequence * tl.num_programs(1) + kv_head) * tiles + tile
            if tl.atomic_add(counter, 1, sem="acq_rel") == used - 1:
                tl.store(counter, 0)
                _merge(partial, lse, out, out_stride_t, out_stride_h, start, tile, count, kv_head, heads, used,
                       splits, GROUP, BQ, QUERIES, ROWS, WIDTH, D, S)  # fmt: skip


@triton.jit
def markov_kernel(base, base_stride, previous, embed, head, out, batch, vocab, RANK: tl.constexpr, R: tl.constexpr,
                  BB: tl.constexpr, BV: tl.constexpr):  # fmt: skip
    """out = base + (embed[previous] @ head^T rounded to the weights' dtype), float32 [batch, vocab]."""
    item = tl.program_id(1) * BB + tl.arange(0, BB)
    word = (tl.program_id(0) * BV + tl.arange(0, BV)).to(tl.int64)
    channel = tl.arange(0, R)
    token = tl.load(previous + item, mask=item < batch, other=0).to(tl.int64)
    e_mask = (item < batch)[:, None] & (channel < RANK)[None, :]
    e = tl.load(embed + token[:, None] * RANK + channel[None, :], mask=e_mask, other=0.0)
    h_mask = (word < vocab)[:, None] & (channel < RANK)[None, :]
    h = tl.load(head + word[:, None] * RANK + channel[None, :], mask=h_mask, other=0.0)
    bias = tl.dot(e, tl.trans(h), input_precision="ieee").to(head.dtype.element_ty).to(tl.float32)
    mask = (item < batch)[:, None] & (word < vocab)[None, :]
    value = tl.load(base + item.to(tl.int64)[:, None] * base_stride + word[None, :], mask=mask, other=0.0)
    tl.store(out + item.to(tl.int64)[:, None] * vocab + word[None, :], value + bias, mask=mask)
