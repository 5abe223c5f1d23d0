# The kernel language is no Python that a type checker knows.
# pyrefly: ignore-errors
"""Candidates for kernels of `deepinfer_kernels_cuda`, not in use: what a visit to a GPU decides between (`gpu_next.py`)."""

from __future__ import annotations

import triton
import triton.language as tl
from deepinfer_kernels_cuda.kernels.dependent import begin


@triton.jit
def _score(logit):
    """sqrt(softplus), softplus as torch has it: the identity above 20; log1p through its exact-ratio form, for small ones."""
    exponential = tl.exp(tl.minimum(logit, 20.0))
    one_more = 1.0 + exponential
    log1p = tl.where(one_more == 1.0, exponential, tl.log(one_more) * (exponential / (one_more - 1.0)))
    return tl.sqrt(tl.where(logit > 20.0, logit, log1p))


@triton.jit
def _keys(row, bias, expert, experts):
    """Signed integers in the order of score + bias; the lowest one where there is no expert."""
    here = expert < experts
    offset = tl.load(bias + expert, mask=here, other=0.0)
    choice = _score(tl.load(row + expert, mask=here, other=0.0)) + offset
    choice = tl.where(choice == choice, choice, -1e30) + 0.0
    bits = choice.to(tl.int32, bitcast=True)
    return tl.where(here, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), -2147483648)


@triton.jit
def router_pieces_kernel(logits, bias, ids, gates, experts, scale, NORMALISE: tl.constexpr, K: tl.constexpr,
                         E: tl.constexpr, REST: tl.constexpr, W: tl.constexpr, PDL: tl.constexpr = False):  # fmt: skip
    """`router_select_kernel` for whole logits with fewer instructions: experts are E + REST, two powers of two (384 leave no
    lane idle), and a chosen expert's score is computed again from its logit instead of carried through the rounds."""
    token = tl.program_id(0).to(tl.int64)
    begin(PDL)
    row = logits + token * experts
    first_ids = tl.arange(0, E)
    key = _keys(row, bias, first_ids, experts)
    if REST > 0:
        rest_ids = E + tl.arange(0, REST)
        rest = _keys(row, bias, rest_ids, experts)
    slot = tl.arange(0, W)
    chosen = tl.full([W], 2147483647, tl.int32)
    for k in tl.static_range(K):
        best = tl.max(key, 0)
        if REST > 0:
            best = tl.maximum(best, tl.max(rest, 0))
        first = tl.min(tl.where(key == best, first_ids, E + REST), 0)
        if REST > 0:
            first = tl.minimum(first, tl.min(tl.where(rest == best, rest_ids, E + REST), 0))
            rest = tl.where(rest_ids == first, -2147483648, rest)
        key = tl.where(first_ids == first, -2147483648, key)
        chosen = tl.where(slot == k, first, chosen)
    inside = slot < K
    picked = tl.where(inside, _score(tl.load(row + chosen, mask=inside, other=0.0)), 0.0)
    if NORMALISE:
        picked = picked / (tl.sum(picked, 0) + 1e-20)
    rank = tl.sum((chosen[None, :] < chosen[:, None]).to(tl.int32), 1)
    tl.store(ids + token * K + rank, chosen.to(tl.int64), mask=inside)
    tl.store(gates + token * K + rank, picked * scale, mask=inside)
