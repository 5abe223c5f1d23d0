"""The end of a step: vocabulary bitmasks, filtered draws, and verification of drafts."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .checks import require, require_dims, require_dtype, require_inner, require_same_device

_PIECE = 256
_BLOCK = 4096
METHODS = ("coupled", "standard", "block")


def _power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def apply_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
    """Set logits to -inf where a 0 bit forbids the token, in place.

    Args:
        logits: [n, vocab], last dimension contiguous.
        bitmask: int32 [m, ceil(vocab / 32)], bit i % 32 of word i // 32 for token i.
        rows: int32 or int64 [m], the logits row of each mask; default row i for mask i.
    """
    from .kernels.sampling import bitmask_kernel

    require_dims("logits", logits, 2)
    require_inner("logits", logits)
    require_dtype("bitmask", bitmask, torch.int32)
    require_inner("bitmask", bitmask)
    vocab = logits.shape[1]
    require(
        bitmask.shape[1] * 32 >= vocab, f"bitmask has {bitmask.shape[1]} words; {vocab} tokens need {-(-vocab // 32)}"
    )
    rows = torch.arange(bitmask.shape[0], device=logits.device) if rows is None else rows
    require_same_device(logits, bitmask, rows)
    if bitmask.shape[0]:
        bitmask_kernel[(-(-vocab // 4096), bitmask.shape[0])](
            logits, logits.stride(0), bitmask, bitmask.stride(0), rows, vocab, WORDS=128, num_warps=4
        )
    return logits


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    numbers: torch.Tensor,
    *,
    min_p: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw one token a row: temperature, min_p, top_k, top_p, then the inverse distribution function at the row's number.

    What a row draws depends on its own arguments only. Ties with the last kept token are kept.

    Args:
        logits: [n, vocab], last dimension contiguous.
        temperatures: float32 [n]; 0 takes the largest logit, the lowest id on ties.
        numbers: float64 [n] in [0, 1); not read for greedy rows.
        min_p: float32 [n], weights under this share of the largest are dropped; None = no row has it.
        top_k: int64 [n], 0 keeps all; None = no row has it. Limits are searched for in one pass over the vocabulary for
            each two bits of a float, so leave it out where no row needs it.
        top_p: float32 or float64 [n], 1 keeps all; None = no row has it.

    Returns:
        int64 [n].
    """
    from .kernels import sampling as kernels

    require_dims("logits", logits, 2)
    require_inner("logits", logits)
    n, vocab = logits.shape
    require_dtype("temperatures", temperatures, torch.float32)
    require_dtype("numbers", numbers, torch.float64)
    for name, tensor in (("temperatures", temperatures), ("numbers", numbers), ("min_p", min_p), ("top_k", top_k),
                         ("top_p", top_p)):  # fmt: skip
        if tensor is not None:
            require(
                tuple(tensor.shape) == (n,) and tensor.is_contiguous(), f"{name} {tuple(tensor.shape)} is not [{n}]"
            )
    require_same_device(logits, temperatures, numbers, min_p, top_k, top_p)
    device = logits.device
    out = torch.empty(n, dtype=torch.int64, device=device)
    if not n:
        return out
    chunks, pieces = -(-vocab // _BLOCK), -(-vocab // _PIECE)
    peaks = torch.empty(n, chunks, dtype=torch.float32, device=device)
    places = torch.empty(n, chunks, dtype=torch.int32, device=device)
    masses = torch.empty(n, pieces, dtype=torch.float64, device=device)
    grid, wide = (chunks, n), {"C": _power(chunks)}
    row = (logits, logits.stride(0))
    kernels.row_peak_kernel[grid](*row, peaks, places, vocab, BLOCK=_BLOCK, num_warps=4)
    limits = None
    if top_k is not None or top_p is not None:
        weights = torch.empty(n, vocab, dtype=torch.float32, device=device)
        limits = torch.empty(n, dtype=torch.float32, device=device)
        kernels.weights_kernel[grid](
            *row, peaks, temperatures, min_p, weights, vocab, chunks, HAS_MIN_P=min_p is not None, BLOCK=_BLOCK, num_warps=4,
            **wide,
        )  # fmt: skip
        kernels.limit_kernel[(n,)](
            weights, temperatures, top_k, top_p, limits, vocab, HAS_K=top_k is not None, HAS_P=top_p is not None,
            BLOCK=_BLOCK, num_warps=16,
        )  # fmt: skip
    flags = {"HAS_MIN_P": min_p is not None, "HAS_LIMIT": limits is not None}
    kernels.masses_kernel[grid](
        *row,
        peaks,
        temperatures,
        min_p,
        limits,
        masses,
        vocab,
        chunks,
        pieces,
        BLOCK=_BLOCK,
        num_warps=4,
        **flags,
        **wide,
    )
    kernels.pick_kernel[(n,)](
        *row, peaks, places, temperatures, min_p, limits, masses, numbers, out, vocab, chunks, pieces, P=_power(pieces),
        num_warps=4, **flags, **wide,
    )  # fmt: skip
    return out


class Verification(NamedTuple):
    """token_ids int64 [R, K + 1], padded with -1; accepted int64 [R], guesses that stand."""

    token_ids: torch.Tensor
    accepted: torch.Tensor


def verify_drafts(
    token_ids: torch.Tensor,
    counts: torch.Tensor,
    target: torch.Tensor,
    seeds: torch.Tensor,
    anchors: torch.Tensor,
    proposal: torch.Tensor | None = None,
    method: str = "standard",
) -> Verification:
    """Which guesses stand and what follows them, without moving the target's distribution; no host synchronisation.

    Same methods and the same random numbers as `deepinfer_specdec.verification.batched.verify_batched`.

    Args:
        token_ids: int64 [R, K], padded with any valid or negative id.
        counts: int64 [R], 0..K.
        target: probabilities [R, K + 1, vocab], float32 or float64, last dimension contiguous.
        seeds: int64 [R].
        anchors: int64 [R], position of each sequence's last emitted token.
        proposal: [R, K, vocab], what the drafts were drawn from; None for one-hot drafts.
        method: `coupled` (draw every position, keep what agrees), `standard` (accept with min(1, p / q)) or `block`.
    """
    require(method in METHODS, f"method {method!r} is not one of {', '.join(METHODS)}")
    require_dims("token_ids", token_ids, 2)
    require_dims("target", target, 3)
    require_inner("target", target)
    rows, width = token_ids.shape
    require(
        tuple(target.shape[:2]) == (rows, width + 1),
        f"target has shape {tuple(target.shape)}; it needs {(rows, width + 1)}",
    )
    for name, tensor in (("token_ids", token_ids), ("counts", counts), ("seeds", seeds), ("anchors", anchors)):
        require_dtype(name, tensor, torch.int64)
        require(
            tensor.shape[0] == rows and tensor.is_contiguous(), f"{name} {tuple(tensor.shape)} does not fit {rows} rows"
        )
    require_same_device(token_ids, counts, target, seeds, anchors, proposal)
    device = token_ids.device
    accepted = torch.zeros(rows, dtype=torch.int64, device=device)
    out = torch.empty(rows, width + 1, dtype=torch.int64, device=device)
    if not rows:
        return Verification(out, accepted)
    every = width == 0 or method == "coupled" or (method == "standard" and proposal is None)
    if proposal is None and not every:
        proposal = torch.nn.functional.one_hot(token_ids.clamp(min=0), target.shape[2]).to(target.dtype)
    weights = None
    if not every:
        require_inner("proposal", proposal)
        require(tuple(proposal.shape) == (rows, width, target.shape[2]), f"proposal has shape {tuple(proposal.shape)}")
        weights = _accept(token_ids, counts, target, proposal, seeds, anchors, accepted, method == "block")
    drawn = _emit(target, None if every else proposal, accepted, counts, weights, seeds, anchors, every, width)
    from .kernels.sampling import agree_kernel, tokens_kernel

    if every and width:
        agree_kernel[(rows,)](drawn, token_ids, counts, accepted, width, W=_power(width + 1), num_warps=1)
    tokens_kernel[(rows,)](token_ids, drawn, accepted, out, width, EVERY=every, W=_power(width + 1), num_warps=1)
    return Verification(out, accepted)


def _accept(token_ids, counts, target, proposal, seeds, anchors, accepted, block: bool) -> torch.Tensor | None:
    """Fill `accepted`; returns the running products of block verification."""
    from .kernels.sampling import accept_kernel, block_accept_kernel, excess_kernel

    rows, width = token_ids.shape
    weights = torch.empty(rows, width + 1, dtype=torch.float64, device=target.device) if block else None
    strides = (target, target.stride(0), target.stride(1), proposal, proposal.stride(0), proposal.stride(1))
    accept_kernel[(rows,)](
        token_ids, counts, *strides, seeds, anchors, weights, accepted, width, BLOCK_METHOD=block, num_warps=1
    )
    if block:
        vocab = target.shape[2]
        chunks = -(-vocab // _BLOCK)
        sums = torch.empty(rows, max(width - 1, 1), chunks, dtype=torch.float64, device=target.device)
        if width > 1:
            excess_kernel[(chunks, rows * (width - 1))](
                *strides, weights, counts, sums, vocab, width, BLOCK=_BLOCK, num_warps=4
            )
        block_accept_kernel[(rows,)](
            weights, sums, counts, seeds, anchors, accepted, width, chunks, C=_power(chunks), num_warps=1
        )
    return weights


def _emit(target, proposal, accepted, counts, weights, seeds, anchors, every: bool, width: int) -> torch.Tensor:
    """Draw the tokens after the accepted guesses, or at every place: int64 [R] or [R, K + 1]."""
    from .kernels.sampling import emit_kernel, emit_masses_kernel

    rows, columns, vocab = target.shape
    pieces, items = -(-vocab // _PIECE), rows * columns if every else rows
    masses = torch.empty(items, pieces, dtype=torch.float64, device=target.device)
    drawn = torch.empty(items, dtype=torch.int64, device=target.device)
    q_row, q_place = (proposal.stride(0), proposal.stride(1)) if proposal is not None else (0, 0)
    source = (target, target.stride(0), target.stride(1), proposal, q_row, q_place, accepted, counts, weights, masses)
    flags = {"EVERY": every, "RESIDUAL": proposal is not None, "SCALED": weights is not None}
    emit_masses_kernel[(-(-vocab // _BLOCK), items)](
        *source, vocab, pieces, columns, width, BLOCK=_BLOCK, num_warps=4, **flags
    )
    emit_kernel[(items,)](
        *source, seeds, anchors, drawn, vocab, pieces, columns, width, P=_power(pieces), num_warps=4, **flags
    )
    return drawn
