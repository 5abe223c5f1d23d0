"""Paged attention of Llama-class models, and the Markov head of DSpark drafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from .checks import require, require_dims, require_dtype, require_inner, require_same_device
from .overlap import overlap

_LOG2E = 1.4426950408889634
_COUNTERS = 4096


@dataclass(frozen=True, slots=True)
class Cut:
    """How attention is cut.

    Attributes:
        rows: Rows of queries a block, heads of a group times tokens; a power of two, at least 16.
        keys: Keys a step; a power of two.
        warps: Warps a block.
        stages: Steps in flight, one more than buffers.
        splits: Most parts of a sequence's keys.
        least: Steps of keys that are worth a part.
        ahead: Read pages a step ahead.
        full: Take keys that all queries of a block see in a loop of their own, without masks; not with `ahead`.
    """

    rows: int
    keys: int = 64
    warps: int = 4
    stages: int = 3
    splits: int = 1
    least: int = 4
    ahead: bool = True
    full: bool = False

    def queries(self, group: int) -> int:
        """Queries of a sequence that a block takes, with `group` heads each."""
        return self.rows // group


def cut_for(sequences: int, kv_heads: int, group: int, width: int, longest: int, dtype: torch.dtype) -> Cut:
    """The cut that was fastest on an H200 (2026-11-30) for sequences of at most `longest` queries each.

    Prompts of 32 x 512 (full: 63.9 us, 63.2 without), 8 x 2,048 (162.5, 174.8) and 256 x 64 behind 512 (128.7, 131.1).
    Decode was measured with SmolLM2's heads (9 over 3 of 64: 16, 64, 256 and 1,000 sequences of 576 to 2,048 keys, one of
    8,192) and an 8B model's (32 over 8 of 128: 64 of 2,048, one of 8,192).
    """
    keys = 32 if dtype == torch.float32 else 64
    if longest > 8:
        full = width <= 64 and dtype != torch.float32
        return Cut(max(_power(group), keys), keys, stages=2, ahead=not full, full=full)
    rows = max(_power(group), 16)
    units = sequences * kv_heads * -(-longest // (rows // group))
    if units <= 16:
        return Cut(rows, keys, stages=3, splits=min(16 if width > 64 else 32, 320 // units))
    if width > 64:
        splits = max(1, 264 // units)
        return Cut(rows, keys, stages=3 if splits > 1 else 2, splits=splits, ahead=splits > 1)
    if units <= 512:
        return Cut(rows, 32, warps=2, stages=4, splits=min(6, 640 // units))
    return Cut(rows, keys, stages=2)


def arrivals(device: torch.device | str) -> torch.Tensor:
    """Counters through which the splits of a call meet: zeros, which it leaves. Calls that share them must not overlap."""
    return torch.zeros(_COUNTERS, dtype=torch.int32, device=device)


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
    cut: Cut | None = None,
    arrived: torch.Tensor | None = None,
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
        cut: How to cut the work; default: `cut_for`.
        arrived: `arrivals` of an earlier call; default: new ones.
        out: Where to write.

    Returns:
        [T, heads, d].
    """
    require_dims("q", q, 3)
    require_inner("q", q)
    require(q.shape[1] % keys.shape[2] == 0, lambda: f"{q.shape[1]} heads are no multiple of {keys.shape[2]} kv heads")
    out = torch.empty_like(q) if out is None else out
    return _attend(
        q, q.shape[1], keys, values, block_table, table_rows, query_starts, seq_lens, None, None, scale, max_queries,
        cut, arrived, out,
    )  # fmt: skip


def rope_gqa(
    qkv: torch.Tensor,
    rope: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_table: torch.Tensor,
    table_rows: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    heads: int,
    scale: float,
    cut: Cut | None = None,
    arrived: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`rope_insert`, then `paged_gqa`, of sequences with one new token each, in one kernel; qkv stays as it is.

    No sequence may read a slot that another one writes in this call.

    Args:
        qkv: [R, (heads + 2 * kv_heads) * d], queries, keys, values.
        rope: float32 [positions, 2, d / 2], cos and sin; channel pairs (k, k + d / 2).
        slots: int64 [R], block * block_size + offset; -1 = the cache has the token already.
        keys, values, block_table, table_rows, query_starts, seq_lens, scale, cut, arrived: As of `paged_gqa`.
        heads: Query heads.
        out: Where to write.

    Returns:
        [R, heads, d].
    """
    require_dims("qkv", qkv, 2)
    require_inner("qkv", qkv)
    require_dims("keys", keys, 4)
    require_dtype("keys", keys, qkv.dtype)
    require_dtype("slots", slots, torch.int64)
    require_inner("slots", slots)
    require_dtype("rope", rope, torch.float32)
    kv_heads, d = keys.shape[2:]
    require(
        qkv.shape[1] == (heads + 2 * kv_heads) * d and heads % kv_heads == 0,
        lambda: (
            f"qkv has {qkv.shape[1]} channels; {heads} + 2 * {kv_heads} heads of {d} have others, or no whole groups"
        ),
    )
    require(
        rope.is_contiguous() and rope.shape[1:] == (2, d // 2) and d % 2 == 0,
        lambda: f"rope has shape {tuple(rope.shape)}; it needs [n, 2, {d // 2}]",
    )
    out = torch.empty(len(qkv), heads, d, dtype=qkv.dtype, device=qkv.device) if out is None else out
    return _attend(
        qkv.view(len(qkv), heads + 2 * kv_heads, d), heads, keys, values, block_table, table_rows, query_starts, seq_lens,
        rope, slots, scale, 1, cut, arrived, out,
    )  # fmt: skip


def _attend(
    q: torch.Tensor, heads: int, keys: torch.Tensor, values: torch.Tensor, block_table: torch.Tensor,
    table_rows: torch.Tensor, query_starts: torch.Tensor, seq_lens: torch.Tensor, rope: torch.Tensor | None,
    slots: torch.Tensor | None, scale: float, max_queries: int, cut: Cut | None, arrived: torch.Tensor | None,
    out: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    from .kernels.llama import paged_gqa_kernel

    require_dims("keys", keys, 4)
    require_inner("keys", keys)
    require_inner("values", values)
    t, d = len(q), q.shape[2]
    block, kv_heads = keys.shape[1], keys.shape[2]
    require(values.shape == keys.shape, lambda: f"values {tuple(values.shape)} and keys {tuple(keys.shape)} differ")
    require(
        keys.shape[3] == d and d <= 256, lambda: f"head width {d} against {keys.shape[3]}; allowed: equal, up to 256"
    )
    require_same_device(q, keys, values, block_table, table_rows, query_starts, seq_lens, rope, slots, arrived, out)
    sequences = seq_lens.shape[0]
    if not t or not sequences:
        return out
    group = heads // kv_heads
    cut = cut_for(sequences, kv_heads, group, d, max_queries, q.dtype) if cut is None else cut
    require(cut.rows >= group, lambda: f"a cut of {cut.rows} rows; a group has {group} heads")
    bq = cut.queries(group)
    tiles = -(-max_queries // bq)
    partial = lse = out
    if cut.splits > 1:
        units = sequences * kv_heads * tiles
        partial = torch.empty(t, heads, cut.splits, d, dtype=torch.float32, device=q.device)
        lse = torch.empty(t, heads, cut.splits, dtype=torch.float32, device=q.device)
        arrived = torch.zeros(units, dtype=torch.int32, device=q.device) if arrived is None else arrived
        require(len(arrived) >= units, lambda: f"arrived has {len(arrived)} counters; {units} are needed")
    queries = min(bq, max_queries)
    paged_gqa_kernel[(tiles * cut.splits, kv_heads, sequences)](
        q, q.stride(0), q.stride(1), keys, values, keys.stride(0), keys.stride(1), keys.stride(2),
        values.stride(0), values.stride(1), values.stride(2), block_table, block_table.stride(0), table_rows,
        query_starts, seq_lens, rope, slots, out, out.stride(0), out.stride(1), partial, lse, arrived, scale * _LOG2E,
        cut.splits, GROUP=group, M=cut.rows, BQ=bq, BLOCK=block, BN=cut.keys, WIDTH=d, D=max(16, _power(d)),
        QUERIES=queries, ROWS=_power(queries * group), S=_power(cut.splits), LEAST=cut.least,
        INSERT=rope is not None, AHEAD=cut.ahead, FULL=cut.full and not cut.ahead,
        num_warps=cut.warps, num_stages=cut.stages, **overlap(q.device),
    )  # fmt: skip
    return out


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


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
    require(head.shape[0] == vocab, lambda: f"head has {head.shape[0]} rows; logits have {vocab} columns")
    out = torch.empty(b, vocab, dtype=torch.float32, device=base_logits.device)
    if b:
        wide = head.dtype == torch.float32
        bb = 16 if b <= 16 or wide else 64
        markov_kernel[(-(-vocab // 64), -(-b // bb))](
            base_logits, base_logits.stride(0), previous, embed, head, out, b, vocab,
            RANK=rank, R=max(16, 1 << (rank - 1).bit_length()), BB=bb, BV=64, num_warps=4,
        )  # fmt: skip
    return MarkovStep(out, embed.index_select(0, previous))
