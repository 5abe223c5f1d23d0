# The kernel language is no Python that a type checker knows.
# pyrefly: ignore-errors
"""What steps with prompts derive from where their rows begin: the row of each token, and rows cut into pieces."""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import begin


@triton.jit
def _row_of(starts, value, rows, steps):
    """The last row whose start is at most `value`; starts[0] is, and rows <= 2^steps."""
    low = tl.zeros_like(value)
    high = low + rows
    for _ in range(steps):
        middle = (low + high) // 2
        right = (tl.load(starts + middle) <= value) & (middle > low)
        low = tl.where(right, middle, low)
        high = tl.where(right, high, tl.maximum(middle, low + 1))
    return low


@triton.jit(do_not_specialize=["table_stride", "rows", "tokens", "steps"])
def ragged_slots_kernel(query_starts, seq_lens, write_floors, table, table_stride, slots, rows, tokens, steps,
                        BLOCK: tl.constexpr, BT: tl.constexpr, PDL: tl.constexpr = False):  # fmt: skip
    """Grid (token tiles,): as `cache_slots_kernel`; -1 also for tokens of no row."""
    begin(PDL)
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    row = _row_of(query_starts, token, rows, steps)
    end = tl.load(query_starts + row + 1)
    position = tl.load(seq_lens + row) - end + token
    written = (token < end) & (position >= tl.load(write_floors + row))
    page = tl.load(table + row.to(tl.int64) * table_stride + position // BLOCK, mask=written, other=0).to(tl.int64)
    tl.store(slots + token, tl.where(written, page * BLOCK + position % BLOCK, -1), mask=token < tokens)


@triton.jit(do_not_specialize=["first", "rows", "length", "pieces", "steps"])
def cut_rows_kernel(query_starts, seq_lens, starts, lengths, table_rows, first, rows, length, pieces, steps, BT: tl.constexpr,
                    PDL: tl.constexpr = False):  # fmt: skip
    """Grid (tiles of pieces and one,): see `cut_rows`. Row r owns the pieces from tokens_before(r) // length + r on."""
    begin(PDL)
    piece = tl.program_id(0) * BT + tl.arange(0, BT)
    query_starts += first
    base = tl.load(query_starts)
    low = tl.zeros_like(piece)
    high = low + rows
    for _ in range(steps):
        middle = (low + high) // 2
        owned = (tl.load(query_starts + middle) - base) // length + middle
        right = (owned <= piece) & (middle > low)
        low = tl.where(right, middle, low)
        high = tl.where(right, high, tl.maximum(middle, low + 1))
    begins, ends = tl.load(query_starts + low), tl.load(query_starts + low + 1)
    nth = piece - ((begins - base) // length + low)
    tl.store(starts + piece, tl.minimum(begins + nth * length, ends), mask=piece <= pieces)
    last = tl.minimum(begins + (nth + 1) * length, ends)
    here = piece < pieces
    tl.store(lengths + piece, tl.load(seq_lens + first + low) - (ends - last), mask=here)
    tl.store(table_rows + piece, first + low, mask=here)


@triton.jit(do_not_specialize=["capacity", "scratch", "rows", "tokens", "steps"])
def ragged_inputs_kernel(query_starts, seq_lens, slots, flat, capacity, scratch, widths, packed, layout, tables, token_ids,
                         positions, rows, tokens, steps, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
                         PDL: tl.constexpr = False):  # fmt: skip
    """Grid (rows + token tiles,): a row's block tables, or BLOCK tokens' ids and positions; see `ragged_inputs`."""
    begin(PDL)
    row = tl.program_id(0)
    if row < rows:
        at = packed
        for group in tl.static_range(GROUPS):
            width = tl.load(widths + group)
            target = tables + tl.load(layout + 2 * group) + row.to(tl.int64) * tl.load(layout + 2 * group + 1)
            for start in range(0, width, BLOCK):
                column = start + tl.arange(0, BLOCK)
                value = tl.load(at + row * width + column, mask=column < width, other=0)
                tl.store(target + column, value, mask=column < width)
            at += rows * width
    else:
        token = (row - rows) * BLOCK + tl.arange(0, BLOCK)
        owner = _row_of(query_starts, token, rows, steps)
        end = tl.load(query_starts + owner + 1)
        inside = token < end
        position = tl.where(inside, tl.load(seq_lens + owner) - end + token, 0).to(tl.int64)
        place = tl.where(inside, tl.load(slots + owner).to(tl.int64) * capacity + position, scratch)
        tl.store(token_ids + token, tl.load(flat + place).to(tl.int64), mask=token < tokens)
        tl.store(positions + token, position, mask=token < tokens)
