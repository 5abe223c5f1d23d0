"""Paged attention on CUDA: one kernel rotates, writes and attends for decode rows; with rows of prompts beside them, two do.

Nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deepinfer_offline.models.base import ForwardBatch
from deepinfer_offline.ops.attention.base import GROUP, AttentionShape
from deepinfer_offline.ops.cuda.support import kernels

_MAX_HEAD_DIM = 256
_SHORT = 8
"""Tokens of a row up to which the kernel's blocks take whole rows; longer ones are cut into pieces first."""
_FUSED_HEAD_DIM = 64
"""Widest head for which rotation and insert inside the attention kernel were measured faster than a kernel of their own."""


def shape_reason(shape: Any) -> str | None:
    """Why the kernels do not take a shape, or None."""
    if not isinstance(shape, AttentionShape):
        return None
    if shape.head_dim > _MAX_HEAD_DIM or shape.head_dim % 2:
        return f"head_dim {shape.head_dim} is not even and at most {_MAX_HEAD_DIM}"
    if shape.block_size & (shape.block_size - 1):
        return f"block_size {shape.block_size} is no power of two"
    return None


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What the layers of a step share. Tensors are on the device.

    Attributes:
        rope: float32 [positions, 2, head_dim / 2], of every position.
        positions: int64 [T].
        slots: int64 [T], flat cache slot of each token, -1 where it is not written.
        table: int32 [R, columns].
        rows: int32 [R], 0, 1, ...
        query_starts: int32 [R + 1].
        seq_lens: int32 [R].
        decodes: rows of one token, which come first; they are also the first `decodes` tokens.
        longest: tokens of the longest other row; 0 if there is none.
        pieces: `deepinfer_kernels_cuda.Pieces` of the other rows where they are long, else None. Ragged rows take no more
            blocks than they have work for, and how they are cut is known on the device only, so a graph can keep it.
        cut: of the kernel for those pieces.
        fused: decode rows alone. A prompt's row, of one token too, may read pages that another row of the step fills
            (`SchedConfig.share_in_step`), so it needs the keys of all rows written first.
    """

    rope: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    table: torch.Tensor
    rows: torch.Tensor
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    decodes: int
    longest: int
    pieces: Any
    cut: Any
    fused: bool


class CudaAttention:
    """A provider of `Attention`. A layer's cache is [blocks, 2, block_size, kv_heads, head_dim]: keys, then values.

    Cascades are not used: rows that share a prefix find its blocks in the L2 cache.
    """

    layout = "cuda-1"
    captures = True
    """A step of decode rows takes no decision from the host, so a graph of it can be replayed."""
    takes_bounds = True
    """Nor does any other, beyond shapes and the tokens of its longest row: `deepinfer_offline.models.base.TakesBounds`."""

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape
        self._kernels = kernels()
        self._arrived = self._kernels.arrivals(shape.device)

    def allocate(self, num_blocks: int) -> torch.Tensor:
        s = self.shape
        size = (num_blocks, 2, s.block_size, s.num_kv_heads, s.head_dim)
        return torch.zeros(size, dtype=s.dtype, device=s.device)

    def blocks(self, cache: torch.Tensor) -> torch.Tensor:
        return cache

    def prepare(self, batch: ForwardBatch, rope: torch.Tensor) -> _Prepared:
        host, table = batch.host, batch.block_tables[GROUP]
        longest = int(host.counts.max(initial=0))
        slots = self._kernels.cache_slots(
            batch.query_starts,
            batch.seq_lens,
            batch.write_floors,
            table,
            block=self.shape.block_size,
            tokens=len(batch.token_ids),
            max_queries=longest,
        )
        longest = longest if host.num_decodes < host.num_rows else 0
        pieces, cut = self._cut(batch, longest)
        numbers = batch.query_starts[:-1]  # of rows of one token each: a launch less
        if longest:
            numbers = torch.arange(host.num_rows, dtype=torch.int32, device=table.device)
        return _Prepared(
            rope=rope,
            positions=batch.positions,
            slots=slots,
            table=table,
            rows=numbers,
            query_starts=batch.query_starts,
            seq_lens=batch.seq_lens,
            decodes=host.num_decodes,
            longest=longest,
            pieces=pieces,
            cut=cut,
            fused=host.num_decodes == len(batch.token_ids) and not host.prefills.any(),
        )

    def _cut(self, batch: ForwardBatch, longest: int) -> tuple[Any, Any]:
        """Pieces of the rows that do not decode, and the cut that they are for; None and None where they stay whole."""
        if longest <= _SHORT:
            return None, None
        s, first = self.shape, batch.host.num_decodes
        group = s.num_heads // s.num_kv_heads
        cut = self._kernels.cut_for(batch.host.num_rows - first, s.num_kv_heads, group, s.head_dim, longest, s.dtype)
        pieces = self._kernels.cut_rows(
            batch.query_starts, batch.seq_lens, first=first, length=cut.queries(group), tokens=len(batch.token_ids)
        )
        return pieces, cut

    def __call__(
        self,
        qkv: torch.Tensor,
        cache: torch.Tensor,
        prepared: _Prepared,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
    ) -> torch.Tensor:
        s, p = self.shape, prepared
        keys, values = cache[:, 0], cache[:, 1]
        if p.fused and q_norm is None and s.head_dim <= _FUSED_HEAD_DIM:
            return self._kernels.rope_gqa(
                qkv,
                p.rope,
                p.slots,
                keys,
                values,
                p.table,
                p.rows,
                p.query_starts,
                p.seq_lens,
                heads=s.num_heads,
                scale=s.scale,
                arrived=self._arrived,
            ).flatten(1)
        self._kernels.rope_insert(
            qkv,
            p.rope,
            p.positions,
            p.slots,
            keys,
            values,
            heads=s.num_heads,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=s.norm_eps,
        )
        q = qkv.view(len(qkv), s.num_heads + 2 * s.num_kv_heads, s.head_dim)[:, : s.num_heads]
        out = torch.empty(q.shape, dtype=qkv.dtype, device=qkv.device)
        n = p.decodes
        if n:
            self._attend(
                q[:n], keys, values, p.table, (p.rows[:n], p.query_starts[: n + 1], p.seq_lens[:n]), 1, out[:n]
            )
        if p.pieces is not None:
            where = (p.pieces.rows, p.pieces.starts, p.pieces.lengths)
            self._attend(q, keys, values, p.table, where, p.cut.queries(s.num_heads // s.num_kv_heads), out, p.cut)
        elif p.longest:
            self._attend(q, keys, values, p.table, (p.rows[n:], p.query_starts[n:], p.seq_lens[n:]), p.longest, out)
        return out.flatten(1)

    def _attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        table: torch.Tensor,
        where: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        longest: int,
        out: torch.Tensor,
        cut: Any = None,
    ) -> None:
        """`where`: rows of the table, first tokens and lengths, as of `paged_gqa`."""
        rows, starts, lengths = where
        self._kernels.paged_gqa(
            q,
            keys,
            values,
            table,
            rows,
            starts,
            lengths,
            scale=self.shape.scale,
            max_queries=longest,
            cut=cut,
            arrived=self._arrived,
            out=out,
        )
