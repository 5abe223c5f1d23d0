"""Manifold-constrained hyper-connections (mHC), single pass: a site's pre-mix is consumed by the following site.

`v41-model` section 2.2. S = residual streams (4 in the released model), d = hidden size.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer_offline.ops.deepsig import cpu


class HyperMix(NamedTuple):
    """Mixing coefficients of one site, float32: pre [t, S], post [t, S], comb [t, S, S] as (from, to)."""

    pre: Tensor
    post: Tensor
    comb: Tensor


def sinkhorn(logits: Tensor, *, iterations: int, eps: float) -> Tensor:
    """Make each matrix nearly doubly stochastic.

    Softmax over the last dimension plus eps, one column normalisation, then `iterations - 1` times rows and columns. Every
    division adds eps to its denominator.

    Args:
        logits: float32 [t, S, S], (from, to).
        iterations: column normalisations in all, at least 1.
        eps: see above.

    Returns:
        float32 [t, S, S].
    """
    if logits.dtype == torch.float32 and cpu.serves():
        found = cpu.sinkhorn(logits, iterations, eps) if logits.device.type == "cpu" else None
        if found is not None:
            return found
    count = logits.shape[-1]
    by_column, by_row = _group_sums(count, logits.device)
    comb = (logits.softmax(dim=-1) + eps).flatten(1)
    floor = torch.full((count * count,), eps, device=logits.device)
    sums = torch.addmm(floor, comb, by_column)
    comb.div_(sums)
    for _ in range(iterations - 1):
        comb.div_(torch.addmm(floor, comb, by_row, out=sums))
        comb.div_(torch.addmm(floor, comb, by_column, out=sums))
    return comb.view_as(logits)


@lru_cache(maxsize=8)
def _group_sums(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """0/1 matrices [S * S, S * S] that replace each entry of a flattened matrix by the sum of its column, or of its row.

    One small product does what a reduction and two broadcasts would, on contiguous memory.
    """
    entry = torch.arange(count * count)
    columns, rows = entry % count, entry // count
    by_column = (columns[:, None] == columns).float()
    by_row = (rows[:, None] == rows).float()
    return by_column.to(device), by_row.to(device)


def mhc_pre(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, iterations: int, eps: float, norm_eps: float
) -> HyperMix:
    """Predict a site's coefficients from the residual streams.

    Args:
        streams: float [t, S, d].
        fn: float32 [S * (S + 2), S * d]; rows: S of pre, S of post, S * S of comb.
        base: float32 [S * (S + 2)].
        scale: float32 [3], for pre, post and comb; or spread over the rows of fn already, [S * (S + 2)].
        iterations: Sinkhorn iterations.
        eps: `hc_eps`.
        norm_eps: `rms_norm_eps`, of the normalisation applied after the projection.

    Returns:
        pre = sigmoid + eps, post = 2 sigmoid, comb from `sinkhorn`; all float32.
    """
    count = streams.shape[1]
    flat = streams.flatten(1).float()
    mean_square = torch.linalg.vector_norm(flat, dim=-1, keepdim=True).square() / flat.shape[-1]
    projected = functional.linear(flat, fn) * torch.rsqrt(mean_square + norm_eps)
    logits = torch.addcmul(base, projected, spread_scale(scale, count))
    pre = torch.sigmoid(logits[:, :count]) + eps
    post = 2 * torch.sigmoid(logits[:, count : 2 * count])
    comb = sinkhorn(logits[:, 2 * count :].unflatten(-1, (count, count)), iterations=iterations, eps=eps)
    return HyperMix(pre, post, comb)


def spread_scale(scale: Tensor, count: int) -> Tensor:
    """One scale for each coefficient: [3] (pre, post, comb) to [S * (S + 2)]; returned as it is when spread already."""
    if scale.numel() != 3:
        return scale
    return torch.cat((scale[0].expand(count), scale[1].expand(count), scale[2].expand(count * count)))


def mhc_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """The sublayer's input, sum over streams of pre * stream: [t, S, d] and float32 [t, S] to [t, d], streams' dtype."""
    return torch.bmm(pre.unsqueeze(1), streams.float()).squeeze(1).to(streams.dtype)


def mhc_post(output: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Add a sublayer's output to the mixed streams: new_o = post_o * output + sum_i comb[i, o] * streams_i.

    Args:
        output: float [t, d].
        streams: float [t, S, d], the streams that the site's coefficients were made from.
        post: float32 [t, S].
        comb: float32 [t, S, S], (from, to).

    Returns:
        [t, S, d] in output's dtype; computed in float32.
    """
    update = post.unsqueeze(-1) * output.float().unsqueeze(1)
    return torch.baddbmm(update, comb.transpose(1, 2), streams.float()).to(output.dtype)
