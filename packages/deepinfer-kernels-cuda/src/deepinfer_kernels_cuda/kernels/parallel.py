# The kernel language is no Python that a type checker knows.
# pyrefly: ignore-errors
"""Rows on their way to the ranks that own their experts, and what comes back to a token.

A buffer holds one segment for each rank. `PEERS`: `delta[r]` bytes lead from an address here to the same place in the memory of
rank r.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import begin

#: Arguments that change from call to call or from rank to rank: one build serves all.
_NUMBERS = [
    "tokens",
    "ranks",
    "me",
    "begin_rank",
    "end_rank",
    "skip",
    "first",
    "apart",
    "here",
    "capacity",
    "most",
    "local",
]


@triton.jit
def at_peer(pointer, delta, rank, PEERS: tl.constexpr):
    """The place of `pointer` in the memory of another rank."""
    if PEERS:
        moved = (pointer.to(tl.int64) + tl.load(delta + rank)).to(pointer.dtype)
        return tl.multiple_of(moved, 16)
    else:
        return pointer


@triton.jit
def segment(counts, rank, me, ranks, first, apart, own, COUNTED: tl.constexpr, BR: tl.constexpr):
    """Row where a rank's segment begins. COUNTED 0: they are `apart`, mine `own` rows on; 1: one behind the other without mine,
    `counts` [ranks]; 2: mine in the buffer of that rank, behind those of lower ranks, `counts` [source, destination]."""
    start = first + rank * apart + tl.where(rank == me, own, 0)
    if COUNTED == 1:
        other = tl.arange(0, BR)
        start += tl.sum(tl.load(counts + other, mask=(other < rank) & (other != me), other=0), 0)
    if COUNTED == 2:
        other = tl.arange(0, BR)
        start += tl.sum(tl.load(counts + other * ranks + rank, mask=other < me, other=0), 0)
    return start


@triton.jit
def goes_there(ids, token, tokens, low, local, K: tl.constexpr, BK: tl.constexpr):
    """1 for each token that has an expert among the `local` ones from `low` on."""
    k = tl.arange(0, BK)
    expert = tl.load(ids + token[:, None] * K + k[None, :], mask=(token < tokens)[:, None] & (k < K)[None, :], other=-1)
    return tl.max(((expert >= low) & (expert < low + local)).to(tl.int32), 1)


@triton.jit(do_not_specialize=_NUMBERS)
def number_rows_kernel(
    ids, places, counts, delta, tokens, local, ranks, K: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr,
    PEERS: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """places[t, r]: how many tokens before t go to rank r too, -1 where t does not; their number to counts[r] (at every peer).

    A program has a block of tokens and counts those of all blocks before: no program waits for another.
    """
    begin(PDL)
    rank, chunk = tl.program_id(0), tl.program_id(1)
    low = rank * local
    inside = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, chunk * BLOCK, BLOCK):
        before += goes_there(ids, start + inside, tokens, low, local, K, BK)
    token = chunk * BLOCK + inside
    wanted = goes_there(ids, token, tokens, low, local, K, BK)
    count = tl.sum(before, 0)
    place = count + tl.cumsum(wanted, 0) - wanted
    tl.store(places + token * ranks + rank, tl.where(wanted > 0, place, -1), mask=token < tokens)
    if chunk == tl.num_programs(1) - 1:
        count += tl.sum(wanted, 0)
        if PEERS:
            for peer in range(ranks):
                there = (counts.to(tl.int64) + tl.load(delta + peer)).to(counts.dtype)
                tl.store(there + rank, count)
        else:
            tl.store(counts + rank, count)


@triton.jit(do_not_specialize=_NUMBERS)
def send_rows_kernel(
    x, ids, weights, places, counts, out, out_ids, out_weights, delta, tokens, width, x_stride, out_stride, ids_stride,
    weights_stride, local, ranks, me, begin_rank, end_rank, skip, first, apart, own_rows, K: tl.constexpr, BK: tl.constexpr,
    BR: tl.constexpr, BLOCK: tl.constexpr, COUNTED: tl.constexpr, PADDED: tl.constexpr, PEERS: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Each token's row, local ids (-1: not there) and weights to the segments of its ranks, at its place; PADDED: at its number,
    which becomes its place, and ids of -1 where it does not go."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    word, k = chunk * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BK)
    here = token < tokens
    expert = tl.load(ids + token * K + k, mask=(k < K) & here, other=-1)
    weight = tl.load(weights + token * K + k, mask=(k < K) & here, other=0.0)
    row = tl.load(x + token * x_stride + word, mask=(word < width) & here, other=0)
    for rank in range(begin_rank, end_rank):
        low = rank * local
        own = (expert >= low) & (expert < low + local)
        if PADDED:
            goes = tl.max(own.to(tl.int32), 0) > 0
            target = token
            tl.store(places + token * ranks + rank, tl.where(goes, token, -1).to(tl.int32), mask=here & (chunk == 0))
        else:
            place = tl.load(places + token * ranks + rank)
            goes = (place >= 0) & (rank != skip)
            target = tl.maximum(place, 0).to(tl.int64)
        target += segment(counts, rank, me, ranks, first, apart, own_rows, COUNTED, BR)
        tl.store(at_peer(out, delta, rank, PEERS) + target * out_stride + word, row, mask=(word < width) & goes)
        told = (k < K) & (chunk == 0) & (goes | PADDED)
        there = tl.where(own, expert - low, -1)
        tl.store(at_peer(out_ids, delta, rank, PEERS) + target * ids_stride + k, there, mask=told)
        tl.store(at_peer(out_weights, delta, rank, PEERS) + target * weights_stride + k, weight, mask=told)


@triton.jit(do_not_specialize=_NUMBERS)
def return_rows_kernel(
    y, ids, counts, back, delta, width, y_stride, ranks, me, capacity, most, K: tl.constexpr, BK: tl.constexpr,
    BR: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Each row of y to the rank that it came from, into the segment of this rank of `back`, at its place; own ones stay."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PADDED:
        k = tl.arange(0, BK)
        source = (row // most).to(tl.int32)
        place = row % most
        goes = tl.max(tl.load(ids + row * K + k, mask=k < K, other=-1), 0) >= 0
    else:
        rank = tl.arange(0, BR)
        count = tl.load(counts + rank * ranks + me, mask=rank < ranks, other=0)
        source = tl.sum(((tl.cumsum(count, 0) <= row) & (rank < ranks)).to(tl.int32), 0)
        place = row - tl.sum(tl.where(rank < source, count, 0), 0)
        goes = source < ranks
    goes = goes & (source != me)
    mask = (word < width) & goes
    data = tl.load(y + row * y_stride + word, mask=mask, other=0)
    there = at_peer(back, delta, tl.where(goes, source, me), True)
    tl.store(there + (me * capacity + place) * width + word, data, mask=mask)


@triton.jit(do_not_specialize=_NUMBERS)
def sum_rows_kernel(
    y, back, places, counts, out, width, y_stride, ranks, me, here, first, apart, BR: tl.constexpr, BLOCK: tl.constexpr,
    COUNTED: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """out[t]: what each rank gave for token t, added in float32 in the order of ranks; mine lies in y from row `here`,
    the others' in their segments of `back`."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for rank in range(ranks):
        place = tl.load(places + token * ranks + rank).to(tl.int64)
        if rank == me:
            value = tl.load(y + (here + place) * y_stride + column, mask=mask & (place >= 0), other=0.0)
        else:
            row = segment(counts, rank, me, ranks, first, apart, 0, COUNTED, BR) + place
            value = tl.load(back + row * width + column, mask=mask & (place >= 0), other=0.0)
        total += value.to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=mask)
