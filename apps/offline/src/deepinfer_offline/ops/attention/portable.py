"""Paged attention in plain torch operations, batched over rows: no loop over sequences.

Items of similar size (`make_items`) are padded into a few buckets, and each bucket is one attention call. A shared prefix
is attended once for all rows of its cascade, and merged with each row's own part by log-sum-exp.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from deepinfer_offline.models.base import ForwardBatch
from deepinfer_offline.ops.attention.base import GROUP, AttentionShape
from deepinfer_offline.ops.attention.buckets import Bucket, make_buckets
from deepinfer_offline.ops.attention.items import make_items
from deepinfer_offline.ops.cpu.memory import cache_zeros
from deepinfer_offline.ops.norm import rms_norm
from deepinfer_offline.ops.registry import Provider, anywhere, registry
from deepinfer_offline.ops.rope import apply_rope

_TILE = 256  # query tokens of one item; bounds what causality wastes on padding


@dataclass(frozen=True, slots=True)
class _Call:
    """A bucket on the device.

    Attributes:
        tokens: int64 [B * Q], token row of each query.
        batch: B.
        blocks: int64 [B * columns].
        bias: [B, 1, Q * group_size, S], 0 where the key is visible, -inf elsewhere; None when all are.
        keep: int64 [n], places of `tokens` that are not padding; None when none is.
    """

    tokens: torch.Tensor
    batch: int
    blocks: torch.Tensor
    bias: torch.Tensor | None
    keep: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Prepared:
    rope: torch.Tensor  # float32 [T, 2, head_dim / 2]
    written: torch.Tensor | None  # int64, token rows to write; None for all
    slots: torch.Tensor  # int64, flat cache position of each written token
    own: tuple[_Call, ...]  # every token once
    shared: tuple[_Call, ...]  # the prefixes of cascades


class TorchAttention:
    """The portable provider of `Attention`. A layer's cache is [2, kv_heads, blocks, block_size, head_dim]."""

    layout = "torch-1"

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape

    def allocate(self, num_blocks: int) -> torch.Tensor:
        s = self.shape
        size = (2, s.num_kv_heads, num_blocks, s.block_size, s.head_dim)
        return cache_zeros(size, s.dtype, s.device)

    def blocks(self, cache: torch.Tensor) -> torch.Tensor:
        return cache.movedim(2, 0)

    def prepare(self, batch: ForwardBatch, rope: torch.Tensor) -> _Prepared:
        host, size = batch.host, self.shape.block_size
        rows = np.repeat(np.arange(host.num_rows), host.counts)
        positions = np.arange(len(rows)) - host.query_starts[rows] + (host.seq_lens - host.counts)[rows]
        table = host.block_tables[GROUP]
        flat = table[rows, positions // size].astype(np.int64) * size + positions % size
        written = np.flatnonzero(positions >= host.write_floors[rows])
        items = make_items(host, batch.cascades, _TILE)
        indices = np.arange(len(items.table_rows))

        def calls(which: np.ndarray) -> tuple[_Call, ...]:
            return tuple(self._call(bucket) for bucket in make_buckets(items, which, positions, table, size))

        return _Prepared(
            rope=rope[batch.positions],
            written=None if len(written) == len(rows) else self._put(written),
            slots=self._put(flat[written]),
            own=calls(indices[: items.num_own]),
            shared=calls(indices[items.num_own :]),
        )

    def __call__(
        self,
        qkv: torch.Tensor,
        cache: torch.Tensor,
        prepared: _Prepared,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
    ) -> torch.Tensor:
        s = self.shape
        heads = qkv.view(len(qkv), -1, s.head_dim)
        q, k, v = heads.split([s.num_heads, s.num_kv_heads, s.num_kv_heads], dim=1)
        if q_norm is not None and k_norm is not None:
            q, k = rms_norm(q, q_norm, s.norm_eps), rms_norm(k, k_norm, s.norm_eps)
        q, k = apply_rope(q, prepared.rope), apply_rope(k, prepared.rope)
        if prepared.written is not None:
            k, v = k[prepared.written], v[prepared.written]
        cache[0].flatten(1, 2).index_copy_(1, prepared.slots, k.transpose(0, 1))
        cache[1].flatten(1, 2).index_copy_(1, prepared.slots, v.transpose(0, 1))
        return self._attend(q, cache, prepared).flatten(1)

    def _attend(self, q: torch.Tensor, cache: torch.Tensor, prepared: _Prepared) -> torch.Tensor:
        if not prepared.shared and len(prepared.own) == 1 and prepared.own[0].keep is None:
            place = prepared.own[0]
            return q.new_empty(q.shape).index_copy_(0, place.tokens, self._run(q, cache, place)[0])
        out = q.new_empty(q.shape, dtype=torch.float32 if prepared.shared else q.dtype)
        weight = q.new_empty(q.shape[:2], dtype=torch.float32)  # log-sum-exp of the scores behind `out`
        for call in prepared.own:
            part, lse, tokens = self._kept(q, cache, call)
            out.index_copy_(0, tokens, part.to(out.dtype))
            weight.index_copy_(0, tokens, lse)
        for call in prepared.shared:
            part, lse, tokens = self._kept(q, cache, call)
            share = torch.sigmoid(lse - weight[tokens])[..., None]  # of the prefix in the whole softmax
            out.index_copy_(0, tokens, part * share + out[tokens] * (1 - share))
        return out.to(q.dtype)

    def _kept(
        self, q: torch.Tensor, cache: torch.Tensor, call: _Call
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        part, lse = self._run(q, cache, call)
        if call.keep is None:
            return part, lse, call.tokens
        return part[call.keep], lse[call.keep], call.tokens[call.keep]

    def _run(self, q: torch.Tensor, cache: torch.Tensor, call: _Call) -> tuple[torch.Tensor, torch.Tensor]:
        """One bucket: outputs [B * Q, heads, d] and log-sum-exps float32 [B * Q, heads]."""
        s, batch = self.shape, call.batch
        found = cache.index_select(2, call.blocks)  # [2, kv_heads, B * columns, block_size, d]
        keys, values = found.view(2, s.num_kv_heads, batch, -1, s.head_dim).transpose(1, 2)
        queries = q[call.tokens].view(batch, -1, s.num_kv_heads, s.group_size, s.head_dim).transpose(1, 2)
        folded = queries.reshape(batch, s.num_kv_heads, -1, s.head_dim)
        out, lse = _softmax_attention(folded, keys, values, call.bias, s.scale)
        back = (batch, s.num_kv_heads, -1, s.group_size)
        out = out.reshape(*back, s.head_dim).transpose(1, 2).reshape(-1, s.num_heads, s.head_dim)
        return out, lse.reshape(back).transpose(1, 2).reshape(-1, s.num_heads)

    def _call(self, bucket: Bucket) -> _Call:
        s = self.shape
        batch, keys = len(bucket.blocks), bucket.blocks.shape[1] * s.block_size
        hidden = np.arange(keys) >= bucket.limits[:, :, None]
        bias = None
        if hidden.any():
            mask = torch.zeros(hidden.shape, dtype=s.dtype, device=s.device)
            mask.masked_fill_(self._put(hidden), float("-inf"))
            bias = mask.repeat_interleave(s.group_size, dim=1)[:, None]
        keep = None if bucket.real.all() else self._put(np.flatnonzero(bucket.real))
        return _Call(self._put(bucket.tokens.ravel()), batch, self._put(bucket.blocks.ravel()), bias, keep)

    def _put(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.shape.device, non_blocking=True)


def _softmax_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and log-sum-exp of q [B, H, Q, d] over k, v [B, H, S, d]; scores are float32."""
    if q.device.type == "cpu":
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = op(q, k, v, 0.0, False, attn_mask=bias, scale=scale)
        return out, lse
    scores = (q.float() @ k.float().transpose(-1, -2)) * scale
    if bias is not None:
        scores = scores + bias
    lse = torch.logsumexp(scores, dim=-1)
    out = torch.exp(scores - lse[..., None]) @ v.float()
    return out.to(q.dtype), lse


registry.register(Provider("paged_attention", "portable", "portable", anywhere, lambda: TorchAttention))
