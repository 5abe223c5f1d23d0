# The kernel language is no Python that a type checker knows.
# pyrefly: ignore-errors
"""Paged grouped-query attention, the Markov step."""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import begin


@triton.jit
def paged_gqa_kernel(
    q, q_stride_t, q_stride_h, keys, values, k_stride_b, k_stride_r, k_stride_h, v_stride_b, v_stride_r, v_stride_h,
    table, table_stride, table_rows, query_starts, seq_lens, out, out_stride_t, out_stride_h, partial, lse, scale_log2,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, BQ: tl.constexpr, BLOCK: tl.constexpr, BN: tl.constexpr,
    WIDTH: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Grid (query tiles * splits, kv heads, sequences). Rows of a tile are BQ tokens x GROUP heads of one kv head."""
    begin(PDL)
    tile = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    kv_head = tl.program_id(1)
    sequence = tl.program_id(2)
    start = tl.load(query_starts + sequence)
    count = tl.load(query_starts + sequence + 1) - start
    if tile * BQ < count:
        length = tl.load(seq_lens + sequence)
        row = tl.arange(0, BQ * GROUP_PAD)
        token = tile * BQ + row // GROUP_PAD
        member = row % GROUP_PAD
        here = (token < count) & (member < GROUP)
        position = length - count + token
        channel = tl.arange(0, D)
        head = kv_head * GROUP + member
        t64 = (start + token).to(tl.int64)
        q_ptr = q + t64[:, None] * q_stride_t + head[:, None] * q_stride_h + channel[None, :]
        q_tile = tl.load(q_ptr, mask=here[:, None] & (channel < WIDTH)[None, :], other=0.0)
        last = tl.minimum(length - count + (tile + 1) * BQ, length)
        blocks = tl.cdiv(last, BN)
        m = tl.full([BQ * GROUP_PAD], float("-inf"), tl.float32)
        total = tl.zeros([BQ * GROUP_PAD], tl.float32)
        acc = tl.zeros([BQ * GROUP_PAD, D], tl.float32)
        table_row = table + tl.load(table_rows + sequence).to(tl.int64) * table_stride
        for block in range(blocks * split // SPLITS, blocks * (split + 1) // SPLITS):
            key = block * BN + tl.arange(0, BN)
            seen = key < last
            page = tl.load(table_row + key // BLOCK, mask=seen, other=0).to(tl.int64)
            inner = (key % BLOCK).to(tl.int64)
            mask = seen[:, None] & (channel < WIDTH)[None, :]
            k_ptr = keys + (page * k_stride_b + inner * k_stride_r)[:, None] + kv_head * k_stride_h + channel[None, :]
            v_ptr = values + (page * v_stride_b + inner * v_stride_r)[:, None] + kv_head * v_stride_h + channel[None, :]
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
        result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        o_mask = here[:, None] & (channel < WIDTH)[None, :]
        if SPLITS == 1:
            target = out + t64[:, None] * out_stride_t + head[:, None] * out_stride_h + channel[None, :]
            tl.store(target, result.to(out.dtype.element_ty), mask=o_mask)
        else:
            heads = tl.num_programs(1) * GROUP
            item = (t64 * heads + head) * SPLITS + split
            tl.store(partial + item[:, None] * WIDTH + channel[None, :], result, mask=o_mask)
            weight = tl.where(total > 0.0, m + tl.log2(total), float("-inf"))
            tl.store(lse + item, weight, mask=here)


@triton.jit
def merge_splits_kernel(partial, lse, out, out_stride_t, out_stride_h, heads, WIDTH: tl.constexpr, D: tl.constexpr,
                        SPLITS: tl.constexpr, S: tl.constexpr, PDL: tl.constexpr = False):  # fmt: skip
    """Merge SPLITS partial results by their log2 weights, in order."""
    begin(PDL)
    item = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, S)
    channel = tl.arange(0, D)
    weight = tl.load(lse + item * SPLITS + split, mask=split < SPLITS, other=float("-inf"))
    top = tl.max(weight, 0)
    weight = tl.exp2(weight - tl.where(top == float("-inf"), 0.0, top))
    weight = weight / tl.maximum(tl.sum(weight, 0), 1e-30)
    mask = (split < SPLITS)[:, None] & (channel < WIDTH)[None, :]
    part = tl.load(partial + (item * SPLITS + split)[:, None] * WIDTH + channel[None, :], mask=mask, other=0.0)
    result = tl.sum(part * weight[:, None], 0)
    target = out + (item // heads) * out_stride_t + (item % heads) * out_stride_h + channel
    tl.store(target, result.to(out.dtype.element_ty), mask=channel < WIDTH)


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
