"""Attention twins in plain torch, in the precision of `dtype`."""

from __future__ import annotations

import torch

from .records import kv_gather


def sparse_mla_decode(
    q: torch.Tensor,
    window_pool: torch.Tensor,
    window_slots: torch.Tensor,
    sink: torch.Tensor | None,
    *,
    scale: float,
    compressed_pool: torch.Tensor | None = None,
    compressed_slots: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over window and selected records with one sink logit a head.

    Args:
        q: [t, heads, n].
        window_pool: uint8 [slots, `fp8` record bytes].
        window_slots: int [t, w], -1 = absent.
        sink: [heads] or None.
        scale: Logit scale.
        compressed_pool: uint8 [slots, `nvfp4` record bytes] or None.
        compressed_slots: int [t, k], -1 = absent.
        dtype: Precision of the arithmetic and of the result.

    Returns:
        Output [t, heads, n] and natural log-sum-exp [t, heads] without the sink (+inf for a row without keys).
    """
    n = q.shape[-1]
    keys = [kv_gather(window_pool, window_slots, "fp8", n, dtype)]
    valid = [(window_slots >= 0) & (window_slots < window_pool.shape[0])]
    if compressed_pool is not None and compressed_slots is not None:
        keys.append(kv_gather(compressed_pool, compressed_slots, "nvfp4", n, dtype))
        valid.append((compressed_slots >= 0) & (compressed_slots < compressed_pool.shape[0]))
    return attend(q.to(dtype), torch.cat(keys, 1), torch.cat(valid, 1), sink, scale)


def attend(
    q: torch.Tensor, keys: torch.Tensor, valid: torch.Tensor, sink: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [t, h, n] over its own keys [t, l, n] where `valid` [t, l]; see `sparse_mla_decode`."""
    logits = torch.einsum("thn,tln->thl", q, keys) * scale
    logits = logits.masked_fill(~valid[:, None, :], -torch.inf)
    lse = torch.logsumexp(logits, -1)
    empty = ~valid.any(-1)
    top = lse if sink is None else torch.logaddexp(lse, sink.to(q.dtype)[None, :].expand_as(lse))
    weights = torch.exp(logits - top[..., None])
    weights = torch.where(empty[:, None, None], 0.0, weights)
    out = torch.einsum("thl,tln->thn", weights, keys)
    return out, torch.where(empty[:, None], torch.inf, lse)


def sparse_mla_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sink: torch.Tensor | None,
    *,
    scale: float,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a dense workspace kv [u, n] through indices int [t, l], -1 = absent."""
    valid = (indices >= 0) & (indices < kv.shape[0])
    keys = kv.to(dtype)[indices.long().clamp(0, max(kv.shape[0] - 1, 0))]
    keys = torch.where(valid[..., None], keys, 0.0)
    return attend(q.to(dtype), keys, valid, sink, scale)


def paged_gqa(
    q: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    block_table: torch.Tensor,
    query_rows: torch.Tensor,
    positions: torch.Tensor,
    *,
    scale: float,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Causal attention of q [t, heads, d] over paged keys and values [blocks, block, kv_heads, d].

    `query_rows` int [t] is each query's row of `block_table` int [rows, max_blocks]; `positions` int [t] its position.
    """
    block = key_pool.shape[1]
    group = q.shape[1] // key_pool.shape[2]
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    for i, (row, position) in enumerate(zip(query_rows.tolist(), positions.tolist(), strict=True)):
        blocks = block_table[row, : position // block + 1].long()
        keys = key_pool[blocks].flatten(0, 1)[: position + 1].to(dtype).repeat_interleave(group, 1)
        values = value_pool[blocks].flatten(0, 1)[: position + 1].to(dtype).repeat_interleave(group, 1)
        weights = torch.softmax(torch.einsum("hd,lhd->hl", q[i].to(dtype), keys) * scale, -1)
        out[i] = torch.einsum("hl,lhd->hd", weights, values)
    return out
