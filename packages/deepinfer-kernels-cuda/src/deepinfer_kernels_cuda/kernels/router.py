# The kernel language is no Python that a type checker knows.
# pyrefly: ignore-errors
"""The expert router: a product split along the hidden size, then selection."""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import begin


@triton.jit
def router_logits_kernel(x, x_stride, weight, part, tokens, experts, d, BT: tl.constexpr, BE: tl.constexpr,
                         BK: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr = False):  # fmt: skip
    """Grid (token tiles, expert tiles, spans of d): partial float32 logits [spans, tokens, experts]."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    begin(PDL)
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    expert = tl.program_id(1) * BE + tl.arange(0, BE)
    span = tl.program_id(2)
    acc = tl.zeros([BT, BE], tl.float32)
    for start in range(span * SPAN, min((span + 1) * SPAN, d), BK):
        column = start + tl.arange(0, BK)
        x_mask = (token < tokens)[:, None] & (column < d)[None, :]
        w_mask = (expert < experts)[:, None] & (column < d)[None, :]
        a = tl.load(x + token.to(tl.int64)[:, None] * x_stride + column[None, :], mask=x_mask, other=0.0)
        b = tl.load(weight + expert.to(tl.int64)[:, None] * d + column[None, :], mask=w_mask, other=0.0)
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    target = part + (span * tokens + token).to(tl.int64)[:, None] * experts + expert[None, :]
    tl.store(target, acc, mask=(token < tokens)[:, None] & (expert < experts)[None, :])


@triton.jit
def router_select_kernel(part, bias, ids, gates, tokens, experts, spans, scale, NORMALISE: tl.constexpr, K: tl.constexpr,
                         E: tl.constexpr, W: tl.constexpr, SPANS: tl.constexpr, PDL: tl.constexpr = False):  # fmt: skip
    """One program a token: sqrt(softplus), top K by score + bias (lowest id on ties), ids ascending, weights."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, E)
    here = expert < experts
    offset = tl.load(bias + expert, mask=here, other=0.0)
    begin(PDL)
    if SPANS == 1:
        logit = tl.load(part + token * experts + expert, mask=here, other=0.0)
    else:
        span = tl.arange(0, SPANS)
        at = (span[:, None] * tokens + token).to(tl.int64) * experts + expert[None, :]
        logit = tl.sum(tl.load(part + at, mask=(span < spans)[:, None] & here[None, :], other=0.0), 0)
    # softplus as torch has it: the identity above 20; log1p through its exact-ratio form, for small exponentials.
    exponential = tl.exp(tl.minimum(logit, 20.0))
    one_more = 1.0 + exponential
    log1p = tl.where(one_more == 1.0, exponential, tl.log(one_more) * (exponential / (one_more - 1.0)))
    score = tl.sqrt(tl.where(logit > 20.0, logit, log1p))
    choice = score + offset
    choice = tl.where(choice == choice, choice, -1e30) + 0.0
    # Signed integers in the order of the floats: a warp reduces those in one instruction.
    bits = choice.to(tl.int32, bitcast=True)
    key = tl.where(here, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), -2147483648)
    slot = tl.arange(0, W)
    chosen = tl.full([W], 2147483647, tl.int32)
    picked = tl.zeros([W], tl.float32)
    for k in tl.static_range(K):
        best = tl.max(key, 0)
        first = tl.min(tl.where(key == best, expert, E), 0)
        # Scores are not negative: their bits order as they do.
        value = tl.max(tl.where(expert == first, score.to(tl.int32, bitcast=True), 0), 0).to(tl.float32, bitcast=True)
        chosen = tl.where(slot == k, first, chosen)
        picked = tl.where(slot == k, value, picked)
        key = tl.where(expert == first, -2147483648, key)
    if NORMALISE:
        picked = picked / (tl.sum(picked, 0) + 1e-20)
    rank = tl.sum((chosen[None, :] < chosen[:, None]).to(tl.int32), 1)
    tl.store(ids + token * K + rank, chosen.to(tl.int64), mask=slot < K)
    tl.store(gates + token * K + rank, picked * scale, mask=slot < K)
