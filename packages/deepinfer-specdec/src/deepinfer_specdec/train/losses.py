"""The losses of the DSpark paper (3.3): cross entropy, total variation, and the confidence head's soft label."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class LossWeights:
    """L = ce * CE + tv * |p_d - p_t|_1 + confidence * BCE, columns weighted by exp(-k / decay), k from 0."""

    ce: float = 0.1
    tv: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0


@dataclass(frozen=True, slots=True)
class Losses:
    """Scalars: the total and its parts before weighting."""

    total: Tensor
    ce: Tensor
    tv: Tensor
    confidence: Tensor


def acceptance(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """1 - total variation [...], the probability that speculative sampling accepts, of logits [..., V]."""
    gap = (draft_logits.float().softmax(-1) - target_logits.float().softmax(-1)).abs().sum(-1)
    return (1.0 - 0.5 * gap).clamp(0.0, 1.0)


def block_losses(
    draft_logits: Tensor, target_logits: Tensor, labels: Tensor, confidence: Tensor, valid: Tensor, weights: LossWeights
) -> Losses:
    """Losses of B blocks.

    Args:
        draft_logits: [B, K, V].
        target_logits: [B, K, V], the target's at the same places.
        labels: int64 [B, K], tokens of the text.
        confidence: float32 [B, K], raw logits of the head.
        valid: bool [B, K], columns to count.
        weights: see there.
    """
    columns = torch.arange(labels.shape[1], device=labels.device)
    weight = valid * torch.exp(-columns / weights.decay)
    total = weight.sum().clamp_min(1e-9)

    def mean(values: Tensor) -> Tensor:
        return (values * weight).sum() / total

    accepted = acceptance(draft_logits, target_logits)
    ce = mean(F.cross_entropy(draft_logits.float().transpose(1, 2), labels, reduction="none"))
    tv = mean(2.0 * (1.0 - accepted))
    sure = mean(F.binary_cross_entropy_with_logits(confidence, accepted.detach(), reduction="none"))
    return Losses(weights.ce * ce + weights.tv * tv + weights.confidence * sure, ce, tv, sure)
