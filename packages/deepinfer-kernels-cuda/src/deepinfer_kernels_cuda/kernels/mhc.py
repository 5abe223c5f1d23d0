"""mHC in one pass over the streams: update, collapse, projection and square sums; then a small finishing kernel."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mhc_stream_kernel(
    streams, output, post, comb, pre, fn, new_streams, collapsed, mix_part, square_part, tokens, d,
    HAS_POST: tl.constexpr, HAS_COLLAPSE: tl.constexpr, HAS_MIX: tl.constexpr, PRECISION: tl.constexpr,
    S: tl.constexpr, ROWS: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Grid (token tiles, channel spans): new streams, collapsed input, partial projections [spans, T, ROWS].

    Every stream element is read once and written once; `fn` comes from L2 once a token tile.
    """
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    span = tl.program_id(1)
    here = token < tokens
    t64 = token.to(tl.int64)
    mix_row = tl.arange(0, ROWS)
    acc = tl.zeros([BT, ROWS], tl.float32)
    square = tl.zeros([BT], tl.float32)
    for begin in range(span * SPAN, min((span + 1) * SPAN, d), BC):
        channel = begin + tl.arange(0, BC)
        mask = here[:, None] & (channel < d)[None, :]
        if HAS_COLLAPSE:
            total = tl.zeros([BT, BC], tl.float32)
        if HAS_POST:
            y = tl.load(output + t64[:, None] * d + channel[None, :], mask=mask, other=0.0).to(tl.float32)
        for o in tl.static_range(S):
            if HAS_POST:
                value = tl.load(post + t64 * S + o, mask=here, other=0.0)[:, None] * y
                for i in tl.static_range(S):
                    old = tl.load(streams + (t64[:, None] * S + i) * d + channel[None, :], mask=mask, other=0.0)
                    weight = tl.load(comb + t64 * (S * S) + i * S + o, mask=here, other=0.0)
                    value += weight[:, None] * old.to(tl.float32)
                rounded = value.to(new_streams.dtype.element_ty)
                tl.store(new_streams + (t64[:, None] * S + o) * d + channel[None, :], rounded, mask=mask)
                value = rounded.to(tl.float32)
            else:
                value = tl.load(streams + (t64[:, None] * S + o) * d + channel[None, :], mask=mask, other=0.0)
                value = value.to(tl.float32)
            if HAS_COLLAPSE:
                total += tl.load(pre + t64 * S + o, mask=here, other=0.0)[:, None] * value
            if HAS_MIX:
                square += tl.sum(value * value, 1)
                f_mask = (mix_row < S * (S + 2))[:, None] & (channel < d)[None, :]
                f_ptr = fn + mix_row[:, None].to(tl.int64) * (S * d) + o * d + channel[None, :]
                projection = tl.load(f_ptr, mask=f_mask, other=0.0)
                acc = tl.dot(value, tl.trans(projection), acc, input_precision=PRECISION)
        if HAS_COLLAPSE:
            target = collapsed + t64[:, None] * d + channel[None, :]
            tl.store(target, total.to(collapsed.dtype.element_ty), mask=mask)
    if HAS_MIX:
        part = (span * tokens + t64)[:, None] * ROWS + mix_row[None, :]
        tl.store(mix_part + part, acc, mask=here[:, None])
        tl.store(square_part + span * tokens + t64, square, mask=here)


@triton.jit
def mhc_finish_kernel(
    mix_part, square_part, base, scale, pre, post, comb, collapsed, norm_weight, normed, tokens, d, spans,
    iterations, eps, mix_eps, norm_eps, HAS_MIX: tl.constexpr, HAS_NORM: tl.constexpr,
    S: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """One program a token: coefficients from the partial projections, Sinkhorn, and the norm of the collapsed row."""
    token = tl.program_id(0).to(tl.int64)
    if HAS_NORM:
        channel = tl.arange(0, D)
        row = tl.load(collapsed + token * d + channel, mask=channel < d, other=0.0).to(tl.float32)
        inverse = 1.0 / tl.sqrt(tl.sum(row * row, 0) / d + norm_eps)
        weight = tl.load(norm_weight + channel, mask=channel < d, other=0.0).to(tl.float32)
        tl.store(normed + token * d + channel, (row * inverse * weight).to(normed.dtype.element_ty), mask=channel < d)
    if HAS_MIX:
        k = tl.arange(0, S)
        p_acc = tl.zeros([S], tl.float32)
        q_acc = tl.zeros([S], tl.float32)
        c_acc = tl.zeros([S, S], tl.float32)
        square = 0.0
        cell = 2 * S + k[:, None] * S + k[None, :]
        for span in range(spans):
            part = mix_part + (span * tokens + token) * ROWS
            p_acc += tl.load(part + k)
            q_acc += tl.load(part + S + k)
            c_acc += tl.load(part + cell)
            square += tl.load(square_part + span * tokens + token)
        inverse = 1.0 / tl.sqrt(square / (S * d) + mix_eps)
        p = tl.load(base + k) + p_acc * inverse * tl.load(scale)
        q = tl.load(base + S + k) + q_acc * inverse * tl.load(scale + 1)
        c = tl.load(base + cell) + c_acc * inverse * tl.load(scale + 2)
        tl.store(pre + token * S + k, 1.0 / (1.0 + tl.exp(-p)) + eps)
        tl.store(post + token * S + k, 2.0 / (1.0 + tl.exp(-q)))
        c = tl.exp(c - tl.max(c, 1)[:, None])
        c = c / tl.sum(c, 1)[:, None] + eps
        c = c / (tl.sum(c, 0)[None, :] + eps)
        for _ in range(iterations - 1):
            c = c / (tl.sum(c, 1)[:, None] + eps)
            c = c / (tl.sum(c, 0)[None, :] + eps)
        tl.store(comb + token * (S * S) + k[:, None] * S + k[None, :], c)
