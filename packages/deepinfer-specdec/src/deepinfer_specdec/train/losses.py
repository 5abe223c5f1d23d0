"""The losses of the DSpark paper (3.3): cross entropy, total variation, and the confidence head's soft label.

The label is the probability of acceptance by the rule that will verify the drafts; the paper's own is rejection sampling's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer_specdec.train.agreement import Rule
from deepinfer_specdec.train.blocks import BlockOutputs

_CHUNK = 1 << 20  # float32 values looked at together: they stay in a processor's cache


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


def block_losses(out: BlockOutputs, weights: LossWeights, rule: Rule) -> Losses:
    """Losses of B blocks; `rule` is what the confidences are probabilities of."""
    columns = torch.arange(out.labels.shape[1], device=out.labels.device)
    decay = torch.exp(-columns / weights.decay)
    share = (out.valid * decay / (out.valid * decay).sum().clamp_min(1e-9)).flatten()
    flat = (out.draft_logits.flatten(0, 1), out.target_logits.flatten(0, 1), out.labels.flatten(), share)
    distance, ce, tv = _Distance.apply(*flat, weights.ce, weights.tv)
    accepted = rule.acceptance(out.target_logits, out.draft_logits.detach()) * ~out.over
    bce = F.binary_cross_entropy_with_logits(out.confidence, accepted, reduction="none")
    told = (out.valid | out.over) * decay
    sure = (bce * told).sum() / told.sum().clamp_min(1e-9)
    return Losses(distance + weights.confidence * sure, ce, tv, sure)


class _Distance(torch.autograd.Function):
    """Weighted cross entropy and total variation of R rows, whose gradient is written down instead of traced.

    A vocabulary is wide: traced, every elementwise op keeps a float32 copy of [R, V]. The gradients by the draft's logits z, with
    p = softmax(z) and s = sign(p - q): p - onehot(label) for the cross entropy, p (s - <p, s>) for |p - q|_1.
    """

    @staticmethod
    def forward(
        ctx: Any, draft: Tensor, target: Tensor, labels: Tensor, share: Tensor, ce_weight: float, tv_weight: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(weighted sum, CE, |p - q|_1) of logits [R, V]; `share` [R] weighs the rows."""
        rows, width = draft.shape
        gradient = torch.empty_like(draft)
        likelihood, gap = torch.empty_like(share), torch.empty_like(share)
        size = max(1, _CHUNK // width)
        for first in range(0, rows, size):
            part = slice(first, first + size)
            wanted = labels[part, None]
            p, q = draft[part].float().softmax(-1), target[part].float().softmax(-1)
            likelihood[part] = p.gather(1, wanted)[:, 0].clamp_min(1e-30).log()
            q.neg_().add_(p)
            gap[part] = q.abs().sum(-1)
            sign = q.sign_()
            inner = (p * sign).sum(-1, keepdim=True)
            slope = sign.sub_(inner).mul_(tv_weight).add_(ce_weight).mul_(p)
            slope.scatter_add_(1, wanted, torch.full_like(inner, -ce_weight))
            gradient[part] = slope.mul_(share[part, None])
        ctx.save_for_backward(gradient)
        ce, tv = -(likelihood * share).sum(), (gap * share).sum()
        ctx.mark_non_differentiable(ce, tv)
        return ce_weight * ce + tv_weight * tv, ce, tv

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        """Gradient by the draft's logits."""
        (gradient,) = ctx.saved_tensors
        return gradient * slopes[0].to(gradient.dtype), None, None, None, None, None
