# The kernel language is no Python that a type checker knows.
# pyrefly: ignore-errors
"""The end of a step: bitmasks, filters, draws by inverse distribution function, verification of drafts.

Sums that decide a draw are float64, in pieces of 256 tokens: a row's result does not depend on how it was cut.
"""

from __future__ import annotations

import triton
import triton.language as tl

PIECE: tl.constexpr = tl.constexpr(256)
_GOLDEN: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
_MIX1: tl.constexpr = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
_MIX2: tl.constexpr = tl.constexpr(0x94D049BB133111EB - (1 << 64))


@triton.jit
def bitmask_kernel(logits, stride, mask_words, mask_stride, rows, vocab, WORDS: tl.constexpr):
    """Grid (word tiles, masks): logits[row] = -inf where the row's int32 bitmask has a 0 bit."""
    item = tl.program_id(1).to(tl.int64)
    row = tl.load(rows + item).to(tl.int64)
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    bit = tl.arange(0, 32)
    column = word[:, None] * 32 + bit[None, :]
    words = tl.load(mask_words + item * mask_stride + word, mask=word * 32 < vocab, other=-1)
    banned = ((words[:, None] >> bit[None, :]) & 1) == 0
    value = tl.full([WORDS, 32], float("-inf"), logits.dtype.element_ty)
    tl.store(logits + row * stride + column, value, mask=(column < vocab) & banned)


@triton.jit
def row_peak_kernel(logits, stride, peaks, places, vocab, BLOCK: tl.constexpr):
    """Grid (chunks, rows): the largest logit of a chunk and its lowest place."""
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * stride + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
    best = tl.max(value, 0)
    at = row * tl.num_programs(0) + chunk
    tl.store(peaks + at, best)
    tl.store(places + at, tl.min(tl.where(value == best, column, vocab), 0))


@triton.jit
def _peak(peaks, row, chunks, C: tl.constexpr):
    chunk = tl.arange(0, C)
    return tl.max(tl.load(peaks + row * chunks + chunk, mask=chunk < chunks, other=float("-inf")), 0)


@triton.jit
def _weight(logits, column, vocab, peak, heat, floor):
    """exp((logit - peak) / heat); what is under the floor weighs nothing."""
    value = tl.load(logits + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
    weight = tl.exp(tl.div_rn(value - peak, tl.broadcast_to(heat, value.shape)))
    return tl.where((column < vocab) & (weight >= floor), weight, 0.0)


@triton.jit
def weights_kernel(logits, stride, peaks, temperatures, min_p, weights, vocab, chunks, HAS_MIN_P: tl.constexpr,
                   C: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Grid (chunks, rows): weights float32 [rows, vocab], for the search of limits. Greedy rows are skipped."""
    row = tl.program_id(1).to(tl.int64)
    heat = tl.load(temperatures + row)
    if heat > 0.0:
        column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        floor = tl.load(min_p + row) if HAS_MIN_P else 0.0
        weight = _weight(logits + row * stride, column, vocab, _peak(peaks, row, chunks, C), heat, floor)
        tl.store(weights + row * vocab + column, weight, mask=column < vocab)


@triton.jit
def _count_over(weights, limit, vocab, least, BLOCK: tl.constexpr):
    """How many weights have bits of at least each of three limits: least, then one and two steps of `limit` more."""
    one = tl.zeros([BLOCK], tl.int32)
    two = tl.zeros([BLOCK], tl.int32)
    three = tl.zeros([BLOCK], tl.int32)
    for begin in tl.range(0, vocab, BLOCK, num_stages=4):
        column = begin + tl.arange(0, BLOCK)
        bits = tl.load(weights + column, mask=column < vocab, other=-1.0).to(tl.int32, bitcast=True)
        one += (bits >= least).to(tl.int32)
        two += (bits >= least + limit).to(tl.int32)
        three += (bits >= least + 2 * limit).to(tl.int32)
    return tl.sum(one, 0), tl.sum(two, 0), tl.sum(three, 0)


@triton.jit
def _mass_over(weights, limit, vocab, least, BLOCK: tl.constexpr):
    """The same with masses instead of counts, float64."""
    one = tl.zeros([BLOCK], tl.float64)
    two = tl.zeros([BLOCK], tl.float64)
    three = tl.zeros([BLOCK], tl.float64)
    for begin in tl.range(0, vocab, BLOCK, num_stages=4):
        column = begin + tl.arange(0, BLOCK)
        value = tl.load(weights + column, mask=column < vocab, other=0.0)
        bits = value.to(tl.int32, bitcast=True)
        wide = value.to(tl.float64)
        one += tl.where(bits >= least, wide, 0.0)
        two += tl.where(bits >= least + limit, wide, 0.0)
        three += tl.where(bits >= least + 2 * limit, wide, 0.0)
    return tl.sum(one, 0), tl.sum(two, 0), tl.sum(three, 0)


@triton.jit
def limit_kernel(weights, temperatures, top_k, top_p, limits, vocab, HAS_K: tl.constexpr, HAS_P: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    """One program a row: the smallest weight that top_k and then top_p keep, float32; ties with it are kept.

    Weights are in 0..1, so their bits order like integers below 2^30: two bits of the limit are found in a pass.
    """
    row = tl.program_id(0).to(tl.int64)
    base = weights + row * vocab
    least = 0
    if tl.load(temperatures + row) > 0.0:
        if HAS_K:
            k = tl.load(top_k + row)
            if (k > 0) & (k < vocab):
                for step in range(15):
                    unit = 1 << (28 - 2 * step)
                    one, two, three = _count_over(base, unit, vocab, least + unit, BLOCK)
                    least += unit * ((one >= k).to(tl.int32) + (two >= k).to(tl.int32) + (three >= k).to(tl.int32))
        if HAS_P:
            share = tl.load(top_p + row).to(tl.float64)
            if share < 1.0:
                total, _two, _three = _mass_over(base, 0, vocab, least, BLOCK)
                goal = share * total
                reached = 0
                for step in range(15):
                    unit = 1 << (28 - 2 * step)
                    one, two, three = _mass_over(base, unit, vocab, reached + unit, BLOCK)
                    reached += unit * (
                        (one >= goal).to(tl.int32) + (two >= goal).to(tl.int32) + (three >= goal).to(tl.int32)
                    )
                least = tl.maximum(least, reached)
    tl.store(limits + row, least.to(tl.float32, bitcast=True))


@triton.jit
def masses_kernel(logits, stride, peaks, temperatures, min_p, limits, masses, vocab, chunks, pieces,
                  HAS_MIN_P: tl.constexpr, HAS_LIMIT: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Grid (chunks, rows): sums of the kept weights, a piece each, float64 [rows, pieces]."""
    row = tl.program_id(1).to(tl.int64)
    heat = tl.load(temperatures + row)
    if heat > 0.0:
        column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        floor = tl.load(min_p + row) if HAS_MIN_P else 0.0
        weight = _weight(logits + row * stride, column, vocab, _peak(peaks, row, chunks, C), heat, floor)
        if HAS_LIMIT:
            weight = tl.where(weight >= tl.load(limits + row), weight, 0.0)
        _store_pieces(masses + row * pieces, weight, pieces, BLOCK)


@triton.jit
def _store_pieces(masses, weight, pieces, BLOCK: tl.constexpr):
    piece = tl.program_id(0) * (BLOCK // PIECE) + tl.arange(0, BLOCK // PIECE)
    total = tl.sum(tl.reshape(weight.to(tl.float64), [BLOCK // PIECE, PIECE]), 1)
    tl.store(masses + piece, total, mask=piece < pieces)


@triton.jit
def _find_piece(masses, pieces, number, P: tl.constexpr):
    """The piece in which the running sum passes the number's share of the total: (piece, what is left, total)."""
    piece = tl.arange(0, P)
    running = tl.cumsum(tl.load(masses + piece, mask=piece < pieces, other=0.0), 0)
    total = tl.max(running, 0)
    goal = number * total
    found = tl.minimum(tl.sum(((running <= goal) & (piece < pieces)).to(tl.int32), 0), pieces - 1)
    before = tl.max(tl.where(piece < found, running, 0.0), 0)
    return found, goal - before, total


@triton.jit
def _find_token(weight, goal):
    """Place in a piece where the running sum passes the goal; rounding may leave it out of reach: the last of weight."""
    place = tl.arange(0, PIECE)
    running = tl.cumsum(weight.to(tl.float64), 0)
    passed = running > goal
    last = tl.max(tl.where(weight > 0, place, 0), 0)
    return tl.minimum(tl.min(tl.where(passed & (weight > 0), place, PIECE), 0), last)


@triton.jit
def pick_kernel(logits, stride, peaks, places, temperatures, min_p, limits, masses, numbers, out, vocab, chunks, pieces,
                HAS_MIN_P: tl.constexpr, HAS_LIMIT: tl.constexpr, C: tl.constexpr, P: tl.constexpr):  # fmt: skip
    """One program a row: the token at which the running sum passes the row's number, or the lowest of the largest."""
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperatures + row)
    peak = _peak(peaks, row, chunks, C)
    if heat > 0.0:
        found, goal, _total = _find_piece(masses + row * pieces, pieces, tl.load(numbers + row), P)
        column = found * PIECE + tl.arange(0, PIECE)
        floor = tl.load(min_p + row) if HAS_MIN_P else 0.0
        weight = _weight(logits + row * stride, column, vocab, peak, heat, floor)
        if HAS_LIMIT:
            weight = tl.where(weight >= tl.load(limits + row), weight, 0.0)
        tl.store(out + row, (found * PIECE + _find_token(weight, goal)).to(tl.int64))
    else:
        chunk = tl.arange(0, C)
        each = tl.load(peaks + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
        place = tl.load(places + row * chunks + chunk, mask=chunk < chunks, other=vocab)
        lowest = tl.min(tl.where(each == peak, place, vocab), 0)
        tl.store(out + row, tl.minimum(lowest, vocab - 1).to(tl.int64))


@triton.jit
def _mix(value):
    value = (value ^ ((value >> 30) & 0x3FFFFFFFF)) * _MIX1
    value = (value ^ ((value >> 27) & 0x1FFFFFFFFF)) * _MIX2
    return value ^ ((value >> 31) & 0x1FFFFFFFF)


@triton.jit
def _uniform(seed, position, stream, anchor):
    """float64 in [0, 1): a function of (seed, position, stream, anchor), all int64; SplitMix64 three times over."""
    key = _mix(seed + _GOLDEN)
    key = _mix(key ^ (position * _GOLDEN + stream))
    key = _mix(key + anchor * _MIX1 + _GOLDEN)
    return ((key >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def accept_kernel(guesses, counts, target, t_row, t_place, proposal, p_row, p_place, seeds, anchors, weights, accepted,
                  K, BLOCK_METHOD: tl.constexpr):  # fmt: skip
    """One program a row. Standard: accepted int64 [R]. Block: the running products, clipped at 1, float64 [R, K + 1]."""
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + row).to(tl.int32)
    seed = tl.load(seeds + row)
    anchor = tl.load(anchors + row)
    kept = 0
    standing = 1
    weight = tl.load(seeds + row).to(tl.float64) * 0.0 + 1.0
    if BLOCK_METHOD:
        tl.store(weights + row * (K + 1), weight)
    for k in range(count):
        guess = tl.load(guesses + row * K + k)
        p = tl.load(target + row * t_row + k * t_place + guess).to(tl.float64)
        q = tl.load(proposal + row * p_row + k * p_place + guess).to(tl.float64)
        if BLOCK_METHOD:
            weight = tl.minimum(weight * (p / q), 1.0)
            tl.store(weights + row * (K + 1) + k + 1, weight)
        else:
            u = _uniform(seed, anchor + 1 + k, 1, 0)
            standing = standing & (u < tl.minimum(p / q, 1.0)).to(tl.int32)
            kept += standing
    if not BLOCK_METHOD:
        tl.store(accepted + row, kept.to(tl.int64))


@triton.jit
def excess_kernel(
    target, t_row, t_place, proposal, p_row, p_place, weights, counts, sums, vocab, K, BLOCK: tl.constexpr
):
    """Grid (chunks, R (K - 1)): sums of max(0, w_k p - q) over a chunk, k = 1 .. K - 1; float64 [R, K - 1, chunks]."""
    item = tl.program_id(1).to(tl.int64)
    row = item // (K - 1)
    k = item % (K - 1) + 1
    if k < tl.load(counts + row):
        column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        weight = tl.load(weights + row * (K + 1) + k)
        p = tl.load(target + row * t_row + k * t_place + column, mask=column < vocab, other=0.0).to(tl.float64)
        q = tl.load(proposal + row * p_row + k * p_place + column, mask=column < vocab, other=0.0).to(tl.float64)
        total = tl.sum(tl.maximum(weight * p - q, 0.0), 0)
        tl.store(sums + item * tl.num_programs(0) + tl.program_id(0), total)


@triton.jit
def block_accept_kernel(weights, sums, counts, seeds, anchors, accepted, K, chunks, C: tl.constexpr):
    """One program a row: the longest prefix that block verification keeps."""
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + row).to(tl.int32)
    seed = tl.load(seeds + row)
    anchor = tl.load(anchors + row)
    chunk = tl.arange(0, C)
    kept = 0
    for k in range(1, count + 1):
        weight = tl.load(weights + row * (K + 1) + k)
        probability = weight
        if k < count:
            at = sums + (row * (K - 1) + k - 1) * chunks
            excess = tl.sum(tl.load(at + chunk, mask=chunk < chunks, other=0.0), 0)
            room = excess + 1.0 - weight
            probability = tl.where(room > 0.0, excess / tl.where(room > 0.0, room, 1.0), 1.0)
        kept = tl.where(_uniform(seed, anchor + k, 3, anchor) < probability, k, kept)
    tl.store(accepted + row, kept.to(tl.int64))


@triton.jit
def _source(row, accepted, counts, weights, columns, K, EVERY: tl.constexpr, SCALED: tl.constexpr):
    """Where an emitted row comes from: (sequence, place, whether its guess was rejected, factor of p)."""
    if EVERY:
        return row // columns, row % columns, 0, 1.0
    place = tl.load(accepted + row)
    factor = 1.0
    if SCALED:
        factor = tl.load(weights + row * (K + 1) + place)
    return row, place, (place < tl.load(counts + row)).to(tl.int32), factor


@triton.jit
def _emitted(target, proposal, column, vocab, factor, rejected, RESIDUAL: tl.constexpr):
    weight = tl.load(target + column, mask=column < vocab, other=0.0).to(tl.float64)
    if RESIDUAL:  # noqa: SIM102 - a constant, and a value on the device
        if rejected != 0:
            q = tl.load(proposal + column, mask=column < vocab, other=0.0).to(tl.float64)
            weight = tl.maximum(factor * weight - q, 0.0)
    return weight


@triton.jit
def emit_masses_kernel(target, t_row, t_place, proposal, p_row, p_place, accepted, counts, weights, masses, vocab, pieces,
                       columns, K, EVERY: tl.constexpr, RESIDUAL: tl.constexpr, SCALED: tl.constexpr,
                       BLOCK: tl.constexpr):  # fmt: skip
    """Grid (chunks, rows): piece sums of what a token is drawn from: the target, or what the proposal left of it."""
    row = tl.program_id(1).to(tl.int64)
    sequence, place, rejected, factor = _source(row, accepted, counts, weights, columns, K, EVERY, SCALED)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    base = target + sequence * t_row + place * t_place
    other = proposal
    if RESIDUAL:
        other = proposal + sequence * p_row + tl.minimum(place, K - 1) * p_place
    _store_pieces(
        masses + row * pieces, _emitted(base, other, column, vocab, factor, rejected, RESIDUAL), pieces, BLOCK
    )


@triton.jit
def emit_kernel(target, t_row, t_place, proposal, p_row, p_place, accepted, counts, weights, masses, seeds, anchors, out,
                vocab, pieces, columns, K, EVERY: tl.constexpr, RESIDUAL: tl.constexpr, SCALED: tl.constexpr,
                P: tl.constexpr):  # fmt: skip
    """One program a row: draw its token with the position's own number."""
    row = tl.program_id(0).to(tl.int64)
    sequence, place, rejected, factor = _source(row, accepted, counts, weights, columns, K, EVERY, SCALED)
    u = _uniform(tl.load(seeds + sequence), tl.load(anchors + sequence) + 1 + place, 0, 0)
    base = target + sequence * t_row + place * t_place
    other = proposal
    if RESIDUAL:
        other = proposal + sequence * p_row + tl.minimum(place, K - 1) * p_place
    found, goal, total = _find_piece(masses + row * pieces, pieces, u, P)
    if RESIDUAL:  # noqa: SIM102 - a constant, and a value on the device
        if total <= 0.0:
            # Rounding left nothing: then p equals q, and p itself is drawn from.
            rejected = 0
            for piece in range(pieces):
                column = piece * PIECE + tl.arange(0, PIECE)
                each = tl.load(base + column, mask=column < vocab, other=0.0).to(tl.float64)
                tl.store(masses + row * pieces + piece, tl.sum(each, 0))
            tl.debug_barrier()
            found, goal, total = _find_piece(masses + row * pieces, pieces, u, P)
    column = found * PIECE + tl.arange(0, PIECE)
    weight = _emitted(base, other, column, vocab, factor, rejected, RESIDUAL)
    tl.store(out + row, (found * PIECE + _find_token(weight, goal)).to(tl.int64))


@triton.jit
def agree_kernel(drawn, guesses, counts, accepted, K, W: tl.constexpr):
    """One program a row: how many leading guesses equal the drawn tokens."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, W)
    inside = k < tl.load(counts + row)
    guess = tl.load(guesses + row * K + k, mask=(k < K) & inside, other=-1)
    token = tl.load(drawn + row * (K + 1) + k, mask=k < K, other=-2)
    differs = tl.where(inside & (guess == token), W, k)
    tl.store(accepted + row, tl.minimum(tl.min(differs, 0), K).to(tl.int64))


@triton.jit
def tokens_kernel(guesses, drawn, accepted, out, K, EVERY: tl.constexpr, W: tl.constexpr):
    """One program a row: the accepted guesses, then the drawn token, then -1."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, W)
    kept = tl.load(accepted + row)
    guess = tl.load(guesses + row * K + k, mask=(k < kept) & (k < K), other=-1)
    last = tl.load(drawn + row * (K + 1) + kept) if EVERY else tl.load(drawn + row)
    token = tl.where(k < kept, guess, tl.where(k == kept, last, -1))
    tl.store(out + row * (K + 1) + k, token, mask=k <= K)
