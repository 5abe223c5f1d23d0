# The kernel language is no Python that a type checker knows.
# pyrefly: ignore-errors
"""What follows attention and Engram's lookup: the grouped output projection and the gate."""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import begin


@triton.jit
def grouped_output_kernel(
    x, x_stride_t, x_stride_h, cos, sin, table_stride, weight, out, tokens, rank,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Grid (rank tiles, groups, token tiles): out[t, g, r] = sum over the group's HEADS heads of rotated-back x . weight.

    The heads' plain columns are one pipelined loop; their last 2 PAIRS columns follow, rotated in registers.
    """
    begin(PDL)
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    group = tl.program_id(1)
    token = tl.program_id(2) * BT + tl.arange(0, BT)
    t_mask = (token < tokens)[:, None]
    r_mask = (r < rank)[:, None]
    t64 = token.to(tl.int64)[:, None]
    K: tl.constexpr = HEADS * WIDTH
    rows = weight + (group * rank + r).to(tl.int64)[:, None] * K
    source = x + t64 * x_stride_t + group * HEADS * x_stride_h
    acc = tl.zeros([BT, BR], tl.float32)
    PLAIN: tl.constexpr = (WIDTH - 2 * PAIRS) // BK
    column = tl.arange(0, BK)
    for step in range(HEADS * PLAIN):
        head = step // PLAIN
        start = (step % PLAIN) * BK
        a = tl.load(source + head * x_stride_h + start + column[None, :], mask=t_mask, other=0.0)
        b = tl.load(rows + head * WIDTH + start + column[None, :], mask=r_mask, other=0.0)
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    k = tl.arange(0, PAIRS)
    tail = tl.arange(0, 2 * PAIRS)
    c = tl.load(cos + t64 * table_stride + k[None, :], mask=t_mask, other=1.0)
    s = tl.load(sin + t64 * table_stride + k[None, :], mask=t_mask, other=0.0)
    for head in range(HEADS):
        start = head * WIDTH + WIDTH - 2 * PAIRS
        a = tl.load(source + head * x_stride_h + WIDTH - 2 * PAIRS + tail[None, :], mask=t_mask, other=0.0)
        real, imag = tl.split(tl.reshape(a.to(tl.float32), [BT, PAIRS, 2]))
        back = tl.reshape(tl.join(real * c + imag * s, imag * c - real * s), [BT, 2 * PAIRS]).to(x.dtype.element_ty)
        b = tl.load(rows + start + tail[None, :], mask=r_mask, other=0.0)
        acc = tl.dot(back, tl.trans(b), acc, input_precision="ieee")
    target = out + t64 * (tl.num_programs(1) * rank) + group * rank + r[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=t_mask & (r < rank)[None, :])


@triton.jit
def _products(h, k, q_weight, k_weight, at, mask):
    """Sums of h^2, k^2 and h k q_weight k_weight over loaded channels."""
    weight = tl.load(q_weight + at, mask=mask, other=0.0).to(tl.float32)
    weight *= tl.load(k_weight + at, mask=mask, other=0.0).to(tl.float32)
    return tl.sum(h * h, 0), tl.sum(k * k, 0), tl.sum(h * weight * k, 0)


@triton.jit
def engram_gate_kernel(streams, projected, stride, q_weight, k_weight, out, d, eps, root, S: tl.constexpr, D: tl.constexpr,
                       REST: tl.constexpr, PDL: tl.constexpr = False):  # fmt: skip
    """Grid (tokens, streams): stream + sigmoid(sign(g) sqrt(max(|g|, 1e-6))) * value, rows in registers."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    stream = tl.program_id(1)
    row = (token * S + stream) * d
    keys = projected + token * stride
    first = tl.arange(0, D)
    mask = first < d
    h = tl.load(streams + row + first, mask=mask, other=0.0).to(tl.float32)
    k = tl.load(keys + stream * d + first, mask=mask, other=0.0).to(tl.float32)
    hh, kk, hk = _products(h, k, q_weight, k_weight, stream * d + first, mask)
    if REST > 0:
        second = D + tl.arange(0, REST)
        rest = second < d
        h2 = tl.load(streams + row + second, mask=rest, other=0.0).to(tl.float32)
        k2 = tl.load(keys + stream * d + second, mask=rest, other=0.0).to(tl.float32)
        more_hh, more_kk, more_hk = _products(h2, k2, q_weight, k_weight, stream * d + second, rest)
        hh += more_hh
        kk += more_kk
        hk += more_hk
    score = hk * (1.0 / tl.sqrt(hh / d + eps)) * (1.0 / tl.sqrt(kk / d + eps)) * root
    size = tl.sqrt(tl.maximum(tl.abs(score), 1e-6))
    negative = score.to(tl.int32, bitcast=True) < 0
    gate = 1.0 / (1.0 + tl.exp(tl.where(negative, size, -size)))
    value = tl.load(keys + S * d + first, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row + first, (h + gate * value).to(out.dtype.element_ty), mask=mask)
    if REST > 0:
        value = tl.load(keys + S * d + second, mask=rest, other=0.0).to(tl.float32)
        tl.store(out + row + second, (h2 + gate * value).to(out.dtype.element_ty), mask=rest)
