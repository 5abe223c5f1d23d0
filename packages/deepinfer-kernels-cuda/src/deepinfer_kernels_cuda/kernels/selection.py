# The kernel language is no Python that a type checker knows.
# pyrefly: ignore-errors
"""Indexer logits, radix top-k with the lowest-index rule, candidate blocks."""

from __future__ import annotations

import triton
import triton.language as tl

from .decode_formats import e2m1_value, e8m0_value


@triton.jit
def indexer_logits_kernel(
    q, q_stride_t, q_stride_h, weights, w_stride, pool, stride_block, stride_row, table, table_stride, table_rows,
    visible, out, out_stride, heads, max_entries,
    BLOCK: tl.constexpr, CHANNELS: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Grid (key tiles, queries): sum over heads of weight * relu(q . k) over paged MXFP4 keys, -inf where not visible.

    BLOCK entries a page; CHANNELS a multiple of 32. Even and odd channels are two products, so a byte is read once.
    """
    query = tl.program_id(1).to(tl.int64)
    seen = tl.load(visible + query)
    begin = tl.program_id(0) * BN
    key = begin + tl.arange(0, BN)
    target = out + query * out_stride + key
    if begin >= seen:
        tl.store(target, tl.full([BN], float("-inf"), out.dtype.element_ty), mask=key < max_entries)
    else:
        valid = key < seen
        row = tl.load(table_rows + query).to(tl.int64)
        page = tl.load(table + row * table_stride + key // BLOCK, mask=valid, other=0).to(tl.int64)
        base = page * stride_block + (key % BLOCK).to(tl.int64) * stride_row
        GROUPS: tl.constexpr = CHANNELS // 32
        group = tl.arange(0, GROUPS)
        byte = tl.arange(0, 16)
        offset = base[:, None, None] + (group[None, :, None] * 16 + byte[None, None, :])
        packed = tl.load(pool + offset, mask=valid[:, None, None], other=0).to(tl.int32)
        s_ptr = pool + base[:, None] + CHANNELS // 2 + group[None, :]
        scale = e8m0_value(tl.load(s_ptr, mask=valid[:, None], other=0))[:, :, None]
        low = tl.reshape(e2m1_value(packed & 15) * scale, [BN, CHANNELS // 2]).to(q.dtype.element_ty)
        high = tl.reshape(e2m1_value(packed >> 4) * scale, [BN, CHANNELS // 2]).to(q.dtype.element_ty)
        head = tl.arange(0, BH)
        pair = tl.arange(0, CHANNELS // 2)
        q_ptr = q + query * q_stride_t + head[:, None] * q_stride_h + 2 * pair[None, :]
        h_mask = (head < heads)[:, None]
        q_even = tl.load(q_ptr, mask=h_mask, other=0.0)
        q_odd = tl.load(q_ptr + 1, mask=h_mask, other=0.0)
        logits = tl.dot(low, tl.trans(q_even), input_precision="ieee")
        logits = tl.dot(high, tl.trans(q_odd), logits, input_precision="ieee")
        # The reference rounds the product to the activation dtype before the ReLU; ties depend on it.
        logits = tl.maximum(logits.to(q.dtype.element_ty).to(tl.float32), 0.0)
        weight = tl.load(weights + query * w_stride + head, mask=head < heads, other=0.0).to(tl.float32)
        score = tl.sum(logits * weight[None, :], 1).to(q.dtype.element_ty).to(tl.float32)
        score = tl.where(valid, score, float("-inf"))
        tl.store(target, score.to(out.dtype.element_ty), mask=key < max_entries)


@triton.jit
def _ordered(value):
    """float32 -> int32 0..2^32-1 as two's complement bits whose unsigned order is the float order; -0.0 = 0.0."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(bits == -2147483648, 0, bits)
    return tl.where(bits < 0, ~bits, bits ^ -2147483648)


@triton.jit
def topk_chunk_kernel(
    scores, stride, source, lengths, width, out_scores, out_index, chunks,
    K: tl.constexpr, K_BLOCK: tl.constexpr, HAS_SOURCE: tl.constexpr, HAS_LENGTHS: tl.constexpr, LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (chunks, rows): the exact top K of BLOCK entries, in ascending position, lowest position on ties.

    The K-th largest key is found bit by bit, by counting, on keys that stay in registers: the time does not depend on the
    data. Chunks of one row stay in order, so the next level may break ties by position again. Missing results: index -1.
    """
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    limit = width
    if HAS_LENGTHS:
        limit = tl.minimum(tl.load(lengths + row), width)
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = column < limit
    value = tl.load(scores + row * stride + column, mask=inside, other=float("-inf")).to(tl.float32)
    index = column
    present = value > float("-inf")
    if HAS_SOURCE:
        index = tl.load(source + row * stride + column, mask=inside, other=-1)
        present = present & (index >= 0)
    key = tl.where(present, _ordered(value), 0).to(tl.uint32, bitcast=True)
    count = tl.sum(present.to(tl.int32), 0)
    target = (row * chunks + chunk) * K
    threshold = tl.zeros([1], tl.uint32)
    if count > K:
        bit = tl.full([1], 1 << 31, tl.uint32)
        for _ in range(32):
            candidate = threshold | bit
            enough = tl.sum((key >= candidate).to(tl.int32), 0) >= K
            threshold = tl.where(enough, candidate, threshold)
            bit = bit >> 1
    above = present & (key > threshold)
    equal = present & (key == threshold)
    room = K - tl.sum(above.to(tl.int32), 0)
    if tl.sum(equal.to(tl.int32), 0) > room:
        chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= room))
    else:
        chosen = above | equal
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(out_index + target + place, index, mask=chosen)
    if not LAST:
        tl.store(out_scores + target + place, value, mask=chosen)
    rest = tl.arange(0, K_BLOCK)
    written = tl.minimum(count, K)
    tl.store(out_index + target + rest, tl.full([K_BLOCK], -1, tl.int32), mask=(rest >= written) & (rest < K))


@triton.jit
def block_max_kernel(scores, stride, visible, out, blocks, width, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Maximum of each SIZE consecutive entries; the block that holds the newest visible entry gets +inf."""
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    mask = (column < width) & (block < blocks)[:, None]
    value = tl.max(tl.load(scores + row * stride + column, mask=mask, other=float("-inf")).to(tl.float32), 1)
    seen = tl.load(visible + row)
    newest = tl.where(seen > 0, (seen - 1) // SIZE, -1)
    value = tl.where(block == newest, float("inf"), value)
    tl.store(out + row * blocks + block, value, mask=block < blocks)


@triton.jit
def block_mask_kernel(scores, stride, chosen, out, width, K, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Mark the entries of chosen blocks that are visible (score > -inf)."""
    row = tl.program_id(1).to(tl.int64)
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    block = tl.load(chosen + row * K + item, mask=item < K, other=-1).to(tl.int64)
    column = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    mask = (block >= 0)[:, None] & (column < width)
    value = tl.load(scores + row * stride + column, mask=mask, other=float("-inf")).to(tl.float32)
    tl.store(out + row * width + column, (value > float("-inf")).to(tl.int8), mask=mask)
