# The kernel language is no Python that a type checker knows.
# pyrefly: ignore-errors
"""mHC: one pass over the streams, a skinny product for the coefficients, and a small finishing kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import begin


@triton.jit
def _row_piece(
    streams, output, post, comb, pre, new_streams, token, channel, d,
    HAS_POST: tl.constexpr, HAS_COLLAPSE: tl.constexpr, HAS_SQUARE: tl.constexpr, S: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Update some channels of one token; returns their collapsed values and squares, float32 [D]."""
    mask = channel < d
    kind = streams.dtype.element_ty
    row = token * (S * d) + channel
    square = tl.zeros([D], tl.float32)
    collapsed = tl.zeros([D], tl.float32)
    r0 = tl.load(streams + row, mask=mask, other=0.0).to(tl.float32)
    r1 = tl.load(streams + row + d, mask=mask, other=0.0).to(tl.float32) if S > 1 else r0
    r2 = tl.load(streams + row + 2 * d, mask=mask, other=0.0).to(tl.float32) if S > 2 else r0
    r3 = tl.load(streams + row + 3 * d, mask=mask, other=0.0).to(tl.float32) if S > 2 else r0
    if HAS_POST:
        y = tl.load(output + token * d + channel, mask=mask, other=0.0).to(tl.float32)
    for o in tl.static_range(S):
        if HAS_POST:
            mix = comb + token * (S * S) + o
            value = tl.load(post + token * S + o) * y + tl.load(mix) * r0
            if S > 1:
                value += tl.load(mix + S) * r1
            if S > 2:
                value += tl.load(mix + 2 * S) * r2 + tl.load(mix + 3 * S) * r3
            rounded = value.to(kind)
            tl.store(new_streams + row + o * d, rounded, mask=mask)
            value = rounded.to(tl.float32)
        else:
            value = r0 if o == 0 else r1 if o == 1 else r2 if o == 2 else r3
        if HAS_COLLAPSE:
            collapsed += tl.load(pre + token * S + o) * value
        if HAS_SQUARE:
            square += value * value
    return collapsed.to(kind), tl.sum(square, 0)


@triton.jit
def mhc_row_kernel(
    streams, output, post, comb, pre, norm_weight, new_streams, out, squares, d, norm_eps,
    HAS_POST: tl.constexpr, HAS_COLLAPSE: tl.constexpr, HAS_NORM: tl.constexpr, HAS_SQUARE: tl.constexpr,
    S: tl.constexpr, D: tl.constexpr, REST: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """One program a token, the whole row in registers: update, collapse, norm and square sum; S is 1, 2 or 4.

    Every stream element is read once and written once, and the collapsed row never leaves the chip unnormalised. The row
    is D + REST channels, two powers of two, so that a width like 5120 wastes no lanes.
    """
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    first = tl.arange(0, D)
    a, square = _row_piece(streams, output, post, comb, pre, new_streams, token, first, d, HAS_POST, HAS_COLLAPSE,
                           HAS_SQUARE, S, D)  # fmt: skip
    total = tl.sum(a.to(tl.float32) * a.to(tl.float32), 0)
    if REST > 0:
        second = D + tl.arange(0, REST)
        b, more = _row_piece(streams, output, post, comb, pre, new_streams, token, second, d, HAS_POST, HAS_COLLAPSE,
                             HAS_SQUARE, S, REST)  # fmt: skip
        square += more
        total += tl.sum(b.to(tl.float32) * b.to(tl.float32), 0)
    if HAS_SQUARE:
        tl.store(squares + token, square)
    if HAS_COLLAPSE:
        inverse = 1.0 / tl.sqrt(total / d + norm_eps)
        if HAS_NORM:
            weight = tl.load(norm_weight + first, mask=first < d, other=0.0).to(tl.float32)
            a = (a.to(tl.float32) * inverse * weight).to(out.dtype.element_ty)
        tl.store(out + token * d + first, a, mask=first < d)
        if REST > 0:
            if HAS_NORM:
                weight = tl.load(norm_weight + second, mask=second < d, other=0.0).to(tl.float32)
                b = (b.to(tl.float32) * inverse * weight).to(out.dtype.element_ty)
            tl.store(out + token * d + second, b, mask=second < d)


@triton.jit
def mhc_project_kernel(
    streams, fn, mix_part, tokens, width, rows, ROWS: tl.constexpr, BT: tl.constexpr,
    BK: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Grid (token tiles, spans of S d): partial projections [spans, ROWS, T].

    fn has `rows` rows: float32, or bfloat16 with the high parts first and the low parts from ROWS / 2 on.
    """
    begin(PDL)
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    span = tl.program_id(1)
    here = token < tokens
    t64 = token.to(tl.int64)
    r = tl.arange(0, ROWS)
    acc = tl.zeros([BT, ROWS], tl.float32)
    for start in range(span * SPAN, min((span + 1) * SPAN, width), BK):
        column = start + tl.arange(0, BK)
        inside = (column < width)[None, :]
        a = tl.load(streams + t64[:, None] * width + column[None, :], mask=here[:, None] & inside, other=0.0)
        b = tl.load(
            fn + r[:, None].to(tl.int64) * width + column[None, :], mask=(r < rows)[:, None] & inside, other=0.0
        )
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    part = (span.to(tl.int64) * ROWS + r[None, :]) * tokens + t64[:, None]
    tl.store(mix_part + part, acc, mask=here[:, None])


@triton.jit
def _mixed(mix_part, there, span, token, here, tokens, index, LOW: tl.constexpr, ROWS: tl.constexpr):
    """Projection `index` [BT, K], summed over the spans (and over the high and low halves of fn)."""
    at = (span[:, None, None].to(tl.int64) * ROWS + index[None, None, :]) * tokens + token[None, :, None]
    mask = there[:, None, None] & here[None, :, None] & (index >= 0)[None, None, :]
    value = tl.load(mix_part + at, mask=mask, other=0.0)
    if LOW > 0:
        value += tl.load(mix_part + at + LOW * tokens, mask=mask, other=0.0)
    return tl.sum(value, 0)


@triton.jit
def mhc_finish_kernel(
    mix_part, squares, base, scale, pre, post, comb, tokens, d, spans, iterations, eps, mix_eps,
    S: tl.constexpr, ROWS: tl.constexpr, LOW: tl.constexpr, SPANS: tl.constexpr, BT: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """BT tokens a program: coefficients from the partial projections, then Sinkhorn on [BT, S, S]."""
    begin(PDL)
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    here = token < tokens
    t64 = token.to(tl.int64)
    k = tl.arange(0, S)
    cell = tl.arange(0, S * S)
    span = tl.arange(0, SPANS)
    there = span < spans
    square = tl.load(squares + token, mask=here, other=0.0)
    inverse = 1.0 / tl.sqrt(square / (S * d) + mix_eps)
    p = _mixed(mix_part, there, span, token, here, tokens, k, LOW, ROWS)
    q = _mixed(mix_part, there, span, token, here, tokens, S + k, LOW, ROWS)
    c = _mixed(mix_part, there, span, token, here, tokens, 2 * S + cell, LOW, ROWS)
    p = tl.load(base + k)[None, :] + p * inverse[:, None] * tl.load(scale)
    q = tl.load(base + S + k)[None, :] + q * inverse[:, None] * tl.load(scale + 1)
    c = tl.load(base + 2 * S + cell)[None, :] + c * inverse[:, None] * tl.load(scale + 2)
    tl.store(pre + t64[:, None] * S + k[None, :], 1.0 / (1.0 + tl.exp(-p)) + eps, mask=here[:, None])
    tl.store(post + t64[:, None] * S + k[None, :], 2.0 / (1.0 + tl.exp(-q)), mask=here[:, None])
    c = tl.reshape(c, [BT, S, S])
    c = tl.exp(c - tl.max(c, 2)[:, :, None])
    c = c / tl.sum(c, 2)[:, :, None] + eps
    c = c / (tl.sum(c, 1)[:, None, :] + eps)
    for _ in range(iterations - 1):
        c = c / (tl.sum(c, 2)[:, :, None] + eps)
        c = c / (tl.sum(c, 1)[:, None, :] + eps)
    tl.store(comb + t64[:, None] * (S * S) + cell[None, :], tl.reshape(c, [BT, S * S]), mask=here[:, None])
