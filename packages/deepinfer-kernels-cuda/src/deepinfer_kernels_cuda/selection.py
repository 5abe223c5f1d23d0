"""Indexer scores, top-k with the lowest-index rule, candidate blocks and the expert router."""

from __future__ import annotations

import math

import torch

from .checks import require, require_dims, require_dtype, require_inner, require_same_device
from .layouts import MXFP4


def indexer_logits(
    q: torch.Tensor,
    weights: torch.Tensor,
    pool: torch.Tensor,
    block_table: torch.Tensor,
    rows: torch.Tensor,
    visible: torch.Tensor,
    *,
    max_entries: int,
) -> torch.Tensor:
    """Score every visible compressed entry for every query over paged MXFP4 keys (V4.1 section 2.5).

    Args:
        q: [t, heads, n], rotated and rounded to MXFP4; n a multiple of 32 with n / 32 a power of two, heads <= 128.
        weights: [t, heads], scaled already.
        pool: uint8 [pages, page_size, n / 2 + n / 32] of `mxfp4` records.
        block_table: int32 [r, max pages].
        rows: int [t], each query's row of the block table.
        visible: int32 [t], entries each query may see.
        max_entries: Columns of the result, at least `visible.max()`.

    Returns:
        float32 [t, max_entries], rounded like the activation dtype, -inf where not visible.
    """
    from .kernels.selection import indexer_logits_kernel

    require_dims("q", q, 3)
    require_inner("q", q)
    require_dims("pool", pool, 3)
    t, heads, n = q.shape
    groups = n // 32
    require(n % 32 == 0 and groups & (groups - 1) == 0, f"{n} channels; allowed: 32 times a power of two")
    require(1 <= heads <= 128, f"{heads} heads; allowed: 1..128")
    require(
        pool.shape[2] == MXFP4.record_bytes(n), f"records of {pool.shape[2]} bytes; mxfp4 of {n} channels has others"
    )
    require(tuple(weights.shape) == (t, heads), f"weights has shape {tuple(weights.shape)}; it needs [{t}, {heads}]")
    require_same_device(q, weights, pool, block_table, rows, visible)
    out = torch.empty(t, max_entries, dtype=torch.float32, device=q.device)
    if t and max_entries:
        bn = 128 if q.dtype == torch.bfloat16 else 32
        indexer_logits_kernel[(-(-max_entries // bn), t)](
            q, q.stride(0), q.stride(1), weights, weights.stride(0), pool, pool.stride(0), pool.stride(1),
            block_table, block_table.stride(0), rows, visible, out, out.stride(0), heads, max_entries,
            BLOCK=pool.shape[1], CHANNELS=n, BH=max(16, 1 << (heads - 1).bit_length()), BN=bn, num_warps=4,
        )  # fmt: skip
    return out


def topk_lowest_index(scores: torch.Tensor, k: int, lengths: torch.Tensor | None = None) -> torch.Tensor:
    """Indices of the k highest entries of each row; of equal scores the lowest index wins, -inf is never selected.

    Chunks of a row are reduced to their own exact top k, then the survivors, until one chunk is left.

    Args:
        scores: [t, n] float32 or bfloat16, last dimension contiguous, no NaN in the entries that count; n < 2^31.
        k: Columns of the result, up to 4096.
        lengths: int32 [t], entries of a row that count; None = n.

    Returns:
        int32 [t, k], ascending, -1 where a row has fewer than k.
    """
    from .kernels.selection import topk_chunk_kernel

    require_dims("scores", scores, 2)
    require_inner("scores", scores)
    require(1 <= k <= 4096, f"k is {k}; allowed: 1..4096")
    require_same_device(scores, lengths)
    t, n = scores.shape
    if not t:
        return torch.empty(t, k, dtype=torch.int32, device=scores.device)
    values, source, stride = scores, None, scores.stride(0)
    block = max(4096, 4 << (k - 1).bit_length())
    while True:
        size = min(block, max(128, 1 << max(n - 1, 1).bit_length()))
        chunks = max(1, -(-n // size))
        index = torch.empty(t, chunks * k, dtype=torch.int32, device=scores.device)
        kept = torch.empty(t, chunks * k, dtype=torch.float32, device=scores.device) if chunks > 1 else values
        topk_chunk_kernel[(chunks, t)](
            values, stride, source, lengths, n, kept, index, chunks,
            K=k, K_BLOCK=1 << (k - 1).bit_length(), HAS_SOURCE=source is not None, HAS_LENGTHS=lengths is not None,
            LAST=chunks == 1, BLOCK=size, num_warps=4 if size <= 1024 else 8 if size <= 4096 else 16,
        )  # fmt: skip
        if chunks == 1:
            return index
        values, source, lengths, stride, n = kept, index, None, chunks * k, chunks * k


def candidate_mask(scores: torch.Tensor, visible: torch.Tensor, *, blocks: int, block_size: int) -> torch.Tensor:
    """The entries later index layers may choose from: the best blocks and always the newest visible one.

    Args:
        scores: [t, s], -inf where not visible.
        visible: int [t].
        blocks: Blocks to keep.
        block_size: Consecutive entries of a block, a power of two.

    Returns:
        bool [t, s].
    """
    from .kernels.selection import block_mask_kernel, block_max_kernel

    require_dims("scores", scores, 2)
    require_inner("scores", scores)
    require(block_size & (block_size - 1) == 0, f"block_size {block_size}; allowed: powers of two")
    require_same_device(scores, visible)
    t, s = scores.shape
    mask = torch.zeros(t, s, dtype=torch.int8, device=scores.device)
    count = -(-s // block_size)
    if t and s:
        best = torch.empty(t, count, dtype=torch.float32, device=scores.device)
        block_max_kernel[(-(-count // 128), t)](
            scores, scores.stride(0), visible, best, count, s, SIZE=block_size, BLOCK=128, num_warps=4
        )
        chosen = topk_lowest_index(best, blocks)
        block_mask_kernel[(-(-blocks // 128), t)](
            scores, scores.stride(0), chosen, mask, s, blocks, SIZE=block_size, BLOCK=128, num_warps=4
        )
    return mask.view(torch.bool)


def router(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, k: int, normalise: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select k experts by sqrt(softplus(x . w)) + bias; ties go to the lowest expert (V4.1 section 2.6).

    Args:
        x: [t, d], last dimension contiguous.
        weight: [experts, d] in x's dtype, contiguous; at most 2048 experts.
        bias: float32 [experts], of the selection only.
        k: Experts of a token.
        normalise: Divide the weights by their sum.
        scale: `routed_scaling_factor`.

    Returns:
        ids int64 [t, k], ascending, and weights float32 [t, k].
    """
    from .kernels.selection import router_logits_kernel, router_select_kernel

    require_dims("x", x, 2)
    require_inner("x", x)
    t, d = x.shape
    experts = weight.shape[0]
    require(weight.shape[1] == d and weight.is_contiguous(), f"weight {tuple(weight.shape)} does not fit x [{t}, {d}]")
    require_dtype("weight", weight, x.dtype)
    require(1 <= k <= experts <= 2048, f"k {k} of {experts} experts; allowed: k <= experts <= 2048")
    require_same_device(x, weight, bias)
    ids = torch.empty(t, k, dtype=torch.int64, device=x.device)
    gates = torch.empty(t, k, dtype=torch.float32, device=x.device)
    if not t:
        return ids, gates
    wide = x.dtype == torch.float32
    bt, be, bk = (16, 64, 32) if wide else (16, 128, 128) if t <= 256 else (64, 128, 64)
    tiles = -(-t // bt) * -(-experts // be)
    spans = max(1, min(-(-d // (4 * bk)), round(264 / tiles)))
    span = math.ceil(math.ceil(d / spans) / bk) * bk
    spans = -(-d // span)
    part = torch.empty(spans, t, experts, dtype=torch.float32, device=x.device)
    router_logits_kernel[(-(-t // bt), -(-experts // be), spans)](
        x, x.stride(0), weight, part, t, experts, d, BT=bt, BE=be, BK=bk, SPAN=span, num_warps=4, num_stages=3
    )
    router_select_kernel[(t,)](
        part, bias.float(), ids, gates, t, experts, spans, scale, NORMALISE=normalise, K=k,
        E=max(16, 1 << (experts - 1).bit_length()), num_warps=1,
    )  # fmt: skip
    return ids, gates
