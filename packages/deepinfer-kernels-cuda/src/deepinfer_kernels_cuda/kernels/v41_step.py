# The kernel language is no Python that a type checker knows.
# pyrefly: ignore-errors
"""What a V4.1 step derives from positions and block tables, and the pooling of token pairs through the ring of open groups."""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import begin


@triton.jit
def window_index_kernel(positions, owners, floors, table, table_stride, own, index, window,
                        BLOCK: tl.constexpr, W: tl.constexpr, PDL: tl.constexpr = False):  # fmt: skip
    """Grid (tokens,): the slots of the last `window` positions, oldest first, -1 below the floor, and the token's own slot."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token).to(tl.int32)
    owner = tl.load(owners + token).to(tl.int64)
    lane = tl.arange(0, W)
    key = position - window + 1 + lane
    present = (key >= tl.maximum(tl.load(floors + owner), 0)) & (lane < window)
    page = tl.load(table + owner * table_stride + key // BLOCK, mask=present, other=0)
    slot = page * BLOCK + key % BLOCK
    tl.store(index + token * window + lane, tl.where(present, slot, -1), mask=lane < window)
    last = tl.load(table + owner * table_stride + position // BLOCK)
    tl.store(own + token, last.to(tl.int64) * BLOCK + position % BLOCK)


@triton.jit
def entry_slots_kernel(positions, owners, write_floors, table, table_stride, slots, visible, tokens,
                       BLOCK: tl.constexpr, RATIO: tl.constexpr, ENTRIES: tl.constexpr, BT: tl.constexpr,
                      PDL: tl.constexpr = False):  # fmt: skip
    """Grid (token tiles,): where the entry goes that a token completes, -1 if it completes none or must not write it, and
    how many entries the token sees."""
    begin(PDL)
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    here = token < tokens
    position = tl.load(positions + token, mask=here, other=0).to(tl.int32)
    owner = tl.load(owners + token, mask=here, other=0).to(tl.int64)
    floor = tl.load(write_floors + owner, mask=here, other=0)
    closes = here & ((position + 1) % RATIO == 0) & (position >= floor)
    page = tl.load(table + owner * table_stride + position // BLOCK, mask=closes, other=0).to(tl.int64)
    slot = page * ENTRIES + position % BLOCK // RATIO
    tl.store(slots + token, tl.where(closes, slot, -1), mask=here)
    tl.store(visible + token, (position + 1) // RATIO, mask=here)


@triton.jit
def selected_slots_kernel(chosen, owners, table, table_stride, K,
                          BLOCK: tl.constexpr, RATIO: tl.constexpr, ENTRIES: tl.constexpr, KB: tl.constexpr,
                      PDL: tl.constexpr = False):  # fmt: skip
    """Grid (tokens, tiles): entry numbers to slots, in place; -1 stays."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * KB + tl.arange(0, KB)
    inside = lane < K
    entry = tl.load(chosen + token * K + lane, mask=inside, other=-1)
    present = entry >= 0
    position = entry * RATIO + (RATIO - 1)
    owner = tl.load(owners + token).to(tl.int64)
    page = tl.load(table + owner * table_stride + position // BLOCK, mask=present, other=0)
    slot = page * ENTRIES + position % BLOCK // RATIO
    tl.store(chosen + token * K + lane, tl.where(present, slot, -1), mask=inside)


@triton.jit
def pool_groups_kernel(rows, row_stride, positions, owners, firsts, slots, ring, ring_stride_block, ring_stride_row,
                       ring_blocks, out, width, ring_rows, RATIO: tl.constexpr, D: tl.constexpr,
                      PDL: tl.constexpr = False):  # fmt: skip
    """Grid (tokens,): softmax-pool the group that a token completes; its earlier rows are in the step or in the ring."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, D)
    inside = channel < width
    target = out + token * width + channel
    if tl.load(slots + token) < 0:
        tl.store(target, tl.zeros([D], tl.float32), mask=inside)
    else:
        position = tl.load(positions + token).to(tl.int32)
        owner = tl.load(owners + token).to(tl.int64)
        first = tl.load(firsts + owner)
        block = tl.load(ring_blocks + owner).to(tl.int64)
        top = tl.full([D], float("-inf"), tl.float32)
        for back in tl.static_range(RATIO):
            at = position - back
            source = rows + (token - back) * row_stride
            if at < first:
                source = ring + block * ring_stride_block + (at % ring_rows) * ring_stride_row
            top = tl.maximum(top, tl.load(source + width + channel, mask=inside, other=0.0))
        total = tl.zeros([D], tl.float32)
        pooled = tl.zeros([D], tl.float32)
        for step in tl.static_range(RATIO):
            back = RATIO - 1 - step
            at = position - back
            source = rows + (token - back) * row_stride
            if at < first:
                source = ring + block * ring_stride_block + (at % ring_rows) * ring_stride_row
            weight = tl.exp(tl.load(source + width + channel, mask=inside, other=0.0) - top)
            total += weight
            pooled += weight * tl.load(source + channel, mask=inside, other=0.0)
        tl.store(target, pooled / total, mask=inside)


@triton.jit
def keep_rows_kernel(rows, row_stride, positions, owners, ends, ring, ring_stride_block, ring_stride_row, ring_blocks,
                     width, ring_rows, D: tl.constexpr, PDL: tl.constexpr = False):  # fmt: skip
    """Grid (tokens,): store the last `ring_rows` rows of each sequence's chunk in its ring."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token).to(tl.int32)
    owner = tl.load(owners + token).to(tl.int64)
    if position >= tl.load(ends + owner) - ring_rows:
        channel = tl.arange(0, D)
        block = tl.load(ring_blocks + owner).to(tl.int64)
        value = tl.load(rows + token * row_stride + channel, mask=channel < width, other=0.0)
        target = ring + block * ring_stride_block + (position % ring_rows) * ring_stride_row + channel
        tl.store(target, value, mask=channel < width)


@triton.jit
def clamped_swiglu_rows_kernel(gate_up, stride, out, width, limit, BLOCK: tl.constexpr, PDL: tl.constexpr = False):
    """silu(min(gate, limit)) * clip(up), float32 inside, rounded once; grid (rows, channel tiles)."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < width
    gate = tl.load(gate_up + row * stride + channel, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + channel, mask=mask, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + channel, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def rotation_kernel(positions, frequencies, cos, sin, pairs, shift, P: tl.constexpr, PDL: tl.constexpr = False):
    """Grid (tokens,): cos and sin of max(position - shift, 0) times each frequency."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, P)
    inside = pair < pairs
    position = tl.maximum(tl.load(positions + token) - shift, 0).to(tl.float32)
    angle = position * tl.load(frequencies + pair, mask=inside, other=0.0)
    tl.store(cos + token * pairs + pair, tl.cos(angle), mask=inside)
    tl.store(sin + token * pairs + pair, tl.sin(angle), mask=inside)


@triton.jit
def step_inputs_kernel(packed, flat, layout, header, tables, token_ids, positions, rows, scratch,
                       GROUPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr = False):  # fmt: skip
    """Grid (rows,): a row's part of `packed` to where a captured step reads it; see `step_inputs`."""
    begin(PDL)
    row = tl.program_id(0)
    live = tl.load(packed)
    here = row < live
    at = packed + 1 + GROUPS
    length = tl.load(at + live + row, mask=here, other=1)
    source = tl.load(at + 2 * live + row, mask=here, other=scratch).to(tl.int64)
    tl.store(header + row, tl.load(at + row, mask=here, other=0))
    tl.store(header + rows + row, length)
    tl.store(header + 2 * rows + row, tl.load(at + 3 * live + row, mask=here, other=scratch))
    tl.store(token_ids + row, tl.load(flat + source).to(tl.int64))
    tl.store(positions + row, (length - 1).to(tl.int64))
    at += 4 * live
    for group in tl.static_range(GROUPS):
        width = tl.load(packed + 1 + group)
        target = tables + tl.load(layout + 2 * group) + row.to(tl.int64) * tl.load(layout + 2 * group + 1)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            value = tl.load(at + row * width + column, mask=here & (column < width), other=0)
            tl.store(target + column, value, mask=column < width)
        at += live * width
