"""Paged attention of Llama-class models, and the Markov head of DSpark drafts."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .capability import device_arch
from .checks import require, require_dims, require_dtype, require_inner, require_same_device
from .overlap import overlap

_LOG2E = 1.4426950408889634


def paged_gqa(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_table: torch.Tensor,
    table_rows: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    max_queries: int,
    splits: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of ragged query chunks over paged keys and values; prefill, decode and verification alike.

    Args:
        q: [T, heads, d] bfloat16 or float32, d <= 256.
        keys: [blocks, block, kv_heads, d], last dimension contiguous; block a power of two.
        values: Like keys.
        block_table: int32 [rows, max blocks].
        table_rows: int32 [R], each sequence's row of the table.
        query_starts: int32 [R + 1], first row of each sequence in q.
        seq_lens: int32 [R], keys of each sequence; its queries are the last positions.
        scale: Logit scale.
        max_queries: Longest chunk.
        splits: Key splits; default: enough blocks to fill the chip when every chunk is short.
        out: Where to write.

    Returns:
        [T, heads, d].
    """
    from .kernels.llama import merge_splits_kernel, paged_gqa_kernel

    require_dims("q", q, 3)
    require_dims("keys", keys, 4)
    require_inner("q", q)
    require_inner("keys", keys)
    require_inner("values", values)
    t, heads, d = q.shape
    block, kv_heads = keys.shape[1], keys.shape[2]
    require(heads % kv_heads == 0, f"{heads} heads are no multiple of {kv_heads} kv heads")
    require(values.shape == keys.shape, f"values {tuple(values.shape)} and keys {tuple(keys.shape)} differ")
    require(keys.shape[3] == d and d <= 256, f"head width {d} against {keys.shape[3]}; allowed: equal, up to 256")
    require_same_device(q, keys, values, block_table, table_rows, query_starts, seq_lens)
    out = torch.empty_like(q) if out is None else out
    sequences = seq_lens.shape[0]
    if not t or not sequences:
        return out
    group = heads // kv_heads
    pad = 1 << (group - 1).bit_length()
    wide = q.dtype == torch.float32
    bq = max(-(-16 // pad), 1) if max_queries <= 8 else max((32 if wide else 64) // pad, 1)
    tiles = -(-max_queries // bq)
    if splits is None:
        units = sequences * kv_heads * tiles
        splits = 1 if max_queries > 8 or device_arch(q.device) == 0 else max(1, min(16, 264 // units))
    partial = lse = out
    if splits > 1:
        partial = torch.empty(t, heads, splits, d, dtype=torch.float32, device=q.device)
        lse = torch.empty(t, heads, splits, dtype=torch.float32, device=q.device)
    paged_gqa_kernel[(tiles * splits, kv_heads, sequences)](
        q, q.stride(0), q.stride(1), keys, values, keys.stride(0), keys.stride(1), keys.stride(2),
        values.stride(0), values.stride(1), values.stride(2), block_table, block_table.stride(0), table_rows,
        query_starts, seq_lens, out, out.stride(0), out.stride(1), partial, lse, scale * _LOG2E,
        GROUP=group, GROUP_PAD=pad, BQ=bq, BLOCK=block, BN=32 if wide else 64, WIDTH=d,
        D=max(16, 1 << (d - 1).bit_length()), SPLITS=splits, num_warps=4, num_stages=2, **overlap(q.device),
    )  # fmt: skip
    if splits > 1:
        merge_splits_kernel[(t * heads,)](
            partial, lse, out, out.stride(0), out.stride(1), heads, WIDTH=d, D=max(16, 1 << (d - 1).bit_length()),
            SPLITS=splits, S=1 << (splits - 1).bit_length(), num_warps=1,
            **overlap(q.device),
        )  # fmt: skip
    return out


class MarkovStep(NamedTuple):
    """logits float32 [b, vocab]; embedding [b, rank] of the previous tokens."""

    logits: torch.Tensor
    embedding: torch.Tensor


def markov_step(
    base_logits: torch.Tensor, previous: torch.Tensor, embed: torch.Tensor, head: torch.Tensor
) -> MarkovStep:
    """Add the transition bias of the previous token (V4.1 section 2.9).

    Args:
        base_logits: float32 [b, vocab].
        previous: int64 [b].
        embed: [vocab, rank], contiguous.
        head: [vocab, rank], contiguous.
    """
    from .kernels.llama import markov_kernel

    require_dims("base_logits", base_logits, 2)
    require_dtype("base_logits", base_logits, torch.float32)
    require_inner("base_logits", base_logits)
    require(embed.is_contiguous() and head.is_contiguous(), "embed and head must be contiguous")
    require_same_device(base_logits, previous, embed, head)
    b, vocab = base_logits.shape
    rank = head.shape[1]
    require(head.shape[0] == vocab, f"head has {head.shape[0]} rows; logits have {vocab} columns")
    out = torch.empty(b, vocab, dtype=torch.float32, device=base_logits.device)
    if b:
        wide = head.dtype == torch.float32
        bb = 16 if b <= 16 or wide else 64
        markov_kernel[(-(-vocab // 64), -(-b // bb))](
            base_logits, base_logits.stride(0), previous, embed, head, out, b, vocab,
            RANK=rank, R=max(16, 1 << (rank - 1).bit_length()), BB=bb, BV=64, num_warps=4,
        )  # fmt: skip
    return MarkovStep(out, embed.index_select(0, previous))
