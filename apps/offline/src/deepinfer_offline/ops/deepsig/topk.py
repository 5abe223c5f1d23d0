"""Selection with a fixed tie rule: of equal scores the lowest index wins, and -inf is never selected."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_offline.ops.deepsig import cpu


def topk_mask(scores: Tensor, k: int) -> Tensor:
    """Which entries are among the k highest of their row.

    Args:
        scores: float [t, n]; -inf marks entries that must not be selected. -0.0 equals 0.0. No NaN.
        k: entries to select; rows with fewer finite entries select all of them.

    Returns:
        bool [t, n].
    """
    if scores.dtype == torch.float32 and cpu.serves(scores):
        return cpu.topk_mask(scores, k)
    present = scores > -torch.inf
    if k >= scores.shape[-1]:
        return present
    threshold = scores.topk(k, dim=-1, sorted=True).values[:, -1:]
    above = scores > threshold
    tied = (scores == threshold) & present
    room = k - above.sum(dim=-1, keepdim=True)
    return above | (tied & (tied.cumsum(dim=-1) <= room))


def mask_to_indices(mask: Tensor, width: int) -> Tensor:
    """Positions of the True entries of each row, ascending, padded with -1: bool [t, n] to int32 [t, width]."""
    rank = mask.cumsum(dim=-1) - 1
    out = torch.full((mask.shape[0], width + 1), -1, dtype=torch.int32, device=mask.device)
    target = torch.where(mask, rank, width)
    columns = torch.arange(mask.shape[-1], dtype=torch.int32, device=mask.device).expand_as(mask)
    out.scatter_(1, target, columns)
    return out[:, :width]


def topk_lowest_index(scores: Tensor, k: int) -> Tensor:
    """Indices of the k highest entries of each row.

    Args:
        scores: float [t, n]; see `topk_mask`.
        k: columns of the result.

    Returns:
        int32 [t, k], ascending, -1 where a row has fewer than k finite entries.
    """
    if scores.dtype == torch.float32 and cpu.serves(scores):
        return cpu.topk(scores, k)
    if k < scores.shape[-1] and scores.numel():
        found = scores.topk(k, dim=-1, sorted=True)
        threshold = found.values[:, -1:]
        # Usually no entry outside the selection equals its lowest score, and every row has k entries: no tie to settle.
        if bool(((scores >= threshold).sum(dim=-1) == k).all()) and bool((threshold > -torch.inf).all()):
            return found.indices.sort(dim=-1).values.to(torch.int32)
    return mask_to_indices(topk_mask(scores, k), k)
