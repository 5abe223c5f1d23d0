"""Indexer scores, top-k with the lowest-index rule, candidate blocks."""

from __future__ import annotations

import torch

from .capability import device_arch, sm_count
from .checks import require, require_dims, require_inner, require_same_device
from .layouts import MXFP4
from .native import NativeKernel, native_reason

#: Keys of a tile, blocks a multiprocessor holds, pages or parts of one that a block can name.
_INDEX_TILE, _INDEX_BLOCKS, _INDEX_PIECES = 128, 6, 512
_INDEXER = NativeKernel(
    "indexer.cu", "indexer_logits", "PqqPqPqPqPiPPqiiii", threads=128, shared=37 * 1024,
    defines=(f"BLOCKS={_INDEX_BLOCKS}", "STAGES=3"),
)  # fmt: skip
#: By threads of a top-k block and blocks of its cluster at most: a thread holds 32 keys, up to 8 blocks share a row.
_TOPK = {
    (threads, most): NativeKernel(
        "topk.cu", "topk", "PqPPiPPiiiii", threads=threads, shared=84 * 1024,
        defines=(f"THREADS={threads}", f"MOST_BLOCKS={most}"),
    )
    for threads, most in ((256, 1), (1024, 2), (1024, 8))
}  # fmt: skip
_TOPK_KEYS, _TOPK_CLUSTER = 32, 8


def _native(device: torch.device) -> bool:
    return device_arch(device) == 90 and native_reason() is None


def indexer_logits(
    q: torch.Tensor,
    weights: torch.Tensor,
    pool: torch.Tensor,
    block_table: torch.Tensor,
    rows: torch.Tensor,
    visible: torch.Tensor,
    *,
    max_entries: int,
    kernel: str | None = None,
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
        kernel: `sm90` or `portable`; default what the device supports best.

    Returns:
        float32 [t, max_entries], rounded like the activation dtype, -inf where not visible.
    """
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
        kernel = kernel or ("sm90" if _fits_indexer(q, weights, pool, block_table, rows) else "portable")
        launch = _indexer_sm90 if kernel == "sm90" else _indexer_portable
        launch(q, weights, pool, block_table, rows, visible, out)
    return out


def _fits_indexer(
    q: torch.Tensor, weights: torch.Tensor, pool: torch.Tensor, table: torch.Tensor, rows: torch.Tensor
) -> bool:
    """Whether the Hopper kernel serves these tensors: whole pages or quarters of a tile are copied in 16-byte units."""
    size = pool.shape[1]
    pages = size >= 4 and size & (size - 1) == 0
    aligned = (
        pool.data_ptr() % 16 == 0
        and pool.stride(0) % 16 == 0
        and pool.stride(1) == pool.shape[2]
        and pool.stride(2) == 1
    )
    return (
        _native(q.device)
        and q.dtype == weights.dtype == torch.bfloat16
        and q.shape[1] <= 32
        and q.shape[2] == 128
        and pages
        and aligned
        and weights.stride(1) == table.stride(1) == 1
        and table.dtype == torch.int32
        and rows.dtype in (torch.int32, torch.int64)
    )


def _indexer_sm90(q, weights, pool, block_table, rows, visible, out) -> None:
    t, heads, _ = q.shape
    tiles = -(-out.shape[1] // _INDEX_TILE)
    pieces = max(1, _INDEX_TILE // pool.shape[1])
    runs = max(min(tiles, sm_count(q.device) * _INDEX_BLOCKS // t), -(-tiles * pieces // _INDEX_PIECES), 1)
    each = -(-tiles // runs)
    runs = -(-tiles // each)
    rows, visible = rows.contiguous(), visible.to(torch.int32).contiguous()
    _INDEXER(
        (runs, t, 1),
        q.data_ptr(), q.stride(0), q.stride(1), weights.data_ptr(), weights.stride(0), pool.data_ptr(), pool.stride(0),
        block_table.data_ptr(), block_table.stride(0), rows.data_ptr(), int(rows.dtype == torch.int64), visible.data_ptr(),
        out.data_ptr(), out.stride(0), heads, out.shape[1], pool.shape[1].bit_length() - 1, each, device=q.device,
    )  # fmt: skip


def _indexer_portable(q, weights, pool, block_table, rows, visible, out) -> None:
    from .kernels.selection import indexer_logits_kernel

    t, heads, n = q.shape
    bn = 128 if q.dtype == torch.bfloat16 else 32
    indexer_logits_kernel[(-(-out.shape[1] // bn), t)](
        q, q.stride(0), q.stride(1), weights, weights.stride(0), pool, pool.stride(0), pool.stride(1),
        block_table, block_table.stride(0), rows, visible, out, out.stride(0), heads, out.shape[1],
        BLOCK=pool.shape[1], CHANNELS=n, BH=max(16, 1 << (heads - 1).bit_length()), BN=bn, num_warps=4,
    )  # fmt: skip


def topk_lowest_index(
    scores: torch.Tensor, k: int, lengths: torch.Tensor | None = None, *, kernel: str | None = None
) -> torch.Tensor:
    """Indices of the k highest entries of each row; of equal scores the lowest index wins, -inf is never selected.

    Chunks of a row are reduced to their own exact top k, then the survivors, until one chunk is left.

    Args:
        scores: [t, n] float32 or bfloat16, last dimension contiguous, no NaN in the entries that count; n < 2^31.
        k: Columns of the result, up to 4096.
        lengths: int32 [t], entries of a row that count; None = n.
        kernel: `sm90` or `portable`; default what the device supports best.

    Returns:
        int32 [t, k], ascending, -1 where a row has fewer than k.
    """
    require_dims("scores", scores, 2)
    require_inner("scores", scores)
    require(1 <= k <= 4096, f"k is {k}; allowed: 1..4096")
    require_same_device(scores, lengths)
    t = scores.shape[0]
    if not t:
        return torch.empty(t, k, dtype=torch.int32, device=scores.device)
    kernel = kernel or (
        "sm90" if _native(scores.device) and scores.dtype in (torch.float32, torch.bfloat16) else "portable"
    )
    return _topk_sm90(scores, k, lengths) if kernel == "sm90" else _topk_portable(scores, k, lengths)


def _topk_sm90(scores: torch.Tensor, k: int, lengths: torch.Tensor | None) -> torch.Tensor:
    t, n = scores.shape
    values, source, stride = scores, None, scores.stride(0)
    lengths = lengths.to(torch.int32).contiguous() if lengths is not None else None
    while True:
        threads = 256 if n <= 256 * _TOPK_KEYS else 1024
        size = 1 if threads == 256 else _cluster_size(t, n, sm_count(scores.device))
        columns = min(_TOPK_KEYS * threads, max(1, -(-n // (size * 4 * threads))) * 4 * threads)
        chunks = max(1, -(-n // (size * columns)))
        index = torch.empty(t, chunks * k, dtype=torch.int32, device=scores.device)
        kept = torch.empty(t, chunks * k, dtype=torch.float32, device=scores.device) if chunks > 1 else None
        unit = values.element_size() * 4
        wide = values.data_ptr() % unit == 0 and stride % 4 == 0
        _TOPK[threads, 1 if threads == 256 else 2 if size <= 2 else _TOPK_CLUSTER](
            (chunks * size, t, 1),
            values.data_ptr(), stride, source.data_ptr() if source is not None else 0,
            lengths.data_ptr() if lengths is not None else 0, n, kept.data_ptr() if kept is not None else 0, index.data_ptr(),
            chunks, k, columns, int(values.dtype == torch.bfloat16), int(wide), device=scores.device, cluster=size,
        )  # fmt: skip
        if kept is None:
            return index
        values, source, lengths, stride, n = kept, index, None, chunks * k, chunks * k


def _cluster_size(rows: int, columns: int, sms: int) -> int:
    """Blocks that share a row: enough to hold it, more where multiprocessors would idle."""
    size = 1
    while size < _TOPK_CLUSTER and (
        size * _TOPK_KEYS * 1024 < columns or (rows * size * 2 <= sms and columns > size * 8192)
    ):
        size *= 2
    return size


def _topk_portable(scores: torch.Tensor, k: int, lengths: torch.Tensor | None) -> torch.Tensor:
    from .kernels.selection import topk_chunk_kernel

    t, n = scores.shape
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
