"""Attention over window and selected compressed keys with a sink; K = V = one shared latent. `v41-model` section 2.3.

    out_h = sum_k exp(q_h . k * scale) k / (sum_k exp(q_h . k * scale) + exp(sink_h))

The sink is one logit a head: it has no value and is not scaled. A compressed entry inside the window is attended twice, once as
window key and once as compressed key: there is one softmax over both lists, without de-duplication.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_offline.ops.deepsig.records import kv_gather

_MAX_SCORES = 1 << 23  # scores held at once by the portable implementation, float32 elements


def attend(q: Tensor, keys: Tensor, allowed: Tensor | None, sink: Tensor, scale: float) -> Tensor:
    """Attention of groups of queries over dense keys.

    Args:
        q: float [b, m, heads, n].
        keys: float [b, l, n]; the last key must be zero: its column carries the sink.
        allowed: bool [b, m, l]; the last column must be True. None = all.
        sink: float32 [heads].
        scale: of the scores, usually n^-0.5.

    Returns:
        [b, m, heads, n] in q's dtype; computed in float32. A query that may see nothing but the sink gets zeros.
    """
    b, m, heads, n = q.shape
    wide = keys.float()
    scores = wide.new_empty(b, m * heads, wide.shape[1])
    torch.baddbmm(scores, q.float().reshape(b, m * heads, n), wide.transpose(1, 2), beta=0, alpha=scale, out=scores)
    by_head = scores.view(b, m, heads, -1)
    if allowed is not None:
        by_head.masked_fill_(~allowed.unsqueeze(2), -torch.inf)
    by_head[..., -1] = sink
    return torch.bmm(scores.softmax(dim=-1), wide).view(b, m, heads, n).to(q.dtype)


def sparse_mla_decode(
    q: Tensor,
    window_pool: Tensor,
    window_slots: Tensor,
    sink: Tensor,
    *,
    scale: float,
    compressed_pool: Tensor | None = None,
    compressed_slots: Tensor | None = None,
) -> Tensor:
    """Attention of single queries over paged records.

    Args:
        q: float [t, heads, n], rotated.
        window_pool: uint8 [slots, bytes of an `fp8` record], window KV of this layer.
        window_slots: int64 [t, w], -1 = absent. Slots that are -1 are not read.
        sink: float32 [heads].
        scale: n^-0.5.
        compressed_pool: uint8 [slots, bytes of an `nvfp4` record], or None for a window-only layer.
        compressed_slots: int64 [t, k], -1 = absent.

    Returns:
        [t, heads, n] in q's dtype, not yet rotated back.
    """
    t, heads, n = q.shape
    columns = window_slots.shape[1] + (0 if compressed_slots is None else compressed_slots.shape[1]) + 1
    step = max(1, _MAX_SCORES // (columns * max(heads, n)))
    out = torch.empty_like(q)
    for start in range(0, t, step):
        rows = slice(start, start + step)
        zero_key = window_slots.new_full((window_slots[rows].shape[0], 1), -1)
        slots = [window_slots[rows]]
        keys = [kv_gather(window_pool, window_slots[rows], "fp8", n, torch.float32)]
        if compressed_pool is not None and compressed_slots is not None:
            slots.append(compressed_slots[rows])
            keys.append(kv_gather(compressed_pool, compressed_slots[rows], "nvfp4", n, torch.float32))
        allowed = torch.cat([s >= 0 for s in slots] + [zero_key < 0], dim=1)
        keys.append(keys[0].new_zeros(allowed.shape[0], 1, n))
        out[rows] = attend(q[rows].unsqueeze(1), torch.cat(keys, 1), allowed.unsqueeze(1), sink, scale).squeeze(1)
    return out


def sparse_mla_prefill(q: Tensor, kv: Tensor, indices: Tensor, sink: Tensor, *, scale: float) -> Tensor:
    """Attention of single queries over a dense workspace of keys (window rows and compressed entries together).

    Args:
        q: float [t, heads, n], rotated.
        kv: float [u, n], already rounded to the cache formats.
        indices: int64 [t, l] into kv, -1 = absent.
        sink: float32 [heads].
        scale: n^-0.5.

    Returns:
        [t, heads, n] in q's dtype, not yet rotated back.
    """
    t, heads, n = q.shape
    padded = torch.cat((kv, kv.new_zeros(1, n)))
    step = max(1, _MAX_SCORES // ((indices.shape[1] + 1) * max(heads, n)))
    out = torch.empty_like(q)
    for start in range(0, t, step):
        rows = slice(start, start + step)
        part = torch.cat((indices[rows], indices.new_full((indices[rows].shape[0], 1), -1)), dim=1)
        allowed = part >= 0
        allowed[:, -1] = True
        keys = padded[torch.where(part >= 0, part, kv.shape[0])]
        out[rows] = attend(q[rows].unsqueeze(1), keys, allowed.unsqueeze(1), sink, scale).squeeze(1)
    return out
