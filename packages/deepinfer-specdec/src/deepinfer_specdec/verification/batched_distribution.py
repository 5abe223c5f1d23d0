"""The batched torch twin of `distribution`: per-row parameters, masks, one pass over the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_specdec.verification.distribution import SamplingFilter


@dataclass(frozen=True, slots=True)
class FilterTensors:
    """Sampling parameters of R rows as tensors [R] on one device."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def of(cls, rules: Sequence[SamplingFilter], device: torch.device | str = "cpu") -> FilterTensors:
        """Pack one rule per row."""
        return cls(
            torch.tensor([rule.temperature for rule in rules], dtype=torch.float64, device=device),
            torch.tensor([rule.top_k for rule in rules], dtype=torch.int64, device=device),
            torch.tensor([rule.top_p for rule in rules], dtype=torch.float64, device=device),
            torch.tensor([rule.min_p for rule in rules], dtype=torch.float64, device=device),
        )

    def repeated(self, columns: int) -> FilterTensors:
        """Every row `columns` times, for the flattened positions of a verification."""
        parts = (self.temperature, self.top_k, self.top_p, self.min_p)
        return FilterTensors(*(part.repeat_interleave(columns) for part in parts))


def unpack_mask(mask: Tensor, vocab: int) -> Tensor:
    """Bool [R, V] from an int32 bitmask [R, ceil(V / 32)], bit i of word w allowing token 32 * w + i."""
    bits = (mask[..., None] >> torch.arange(32, device=mask.device, dtype=mask.dtype)) & 1
    return bits.flatten(-2)[..., :vocab].bool()


def distribution_batched(logits: Tensor, rules: FilterTensors, mask: Tensor | None = None) -> Tensor:
    """float64 probabilities [R, V] of `logits` [R, V]; `mask` bool [R, V] allows. The rules are those of
    `distribution`.
    """
    values = logits.double()
    if mask is not None:
        values = values.masked_fill(~mask, -torch.inf)
    top, best = values.max(-1, keepdim=True)
    greedy = (rules.temperature == 0.0)[:, None]
    temperature = rules.temperature[:, None].where(~greedy, torch.ones_like(top))
    weights = ((values - top) / temperature).exp()
    weights = weights.where(weights >= rules.min_p[:, None], torch.zeros_like(weights))
    weights = _top_k_top_p(weights, rules)
    one_hot = torch.zeros_like(weights).scatter(-1, best, 1.0)
    return torch.where(greedy, one_hot, weights)


def _top_k_top_p(weights: Tensor, rules: FilterTensors) -> Tensor:
    vocab = weights.shape[-1]
    if bool(((rules.top_k <= 0) & (rules.top_p >= 1.0)).all()):
        return weights / weights.sum(-1, keepdim=True)
    ranked, order = weights.sort(stable=True, dim=-1, descending=True)
    k = torch.where(rules.top_k > 0, rules.top_k.clamp(max=vocab), vocab)
    kth = ranked.gather(-1, (k - 1)[:, None])
    ranked = ranked.where(ranked >= kth, torch.zeros_like(ranked))
    ranked = ranked / ranked.sum(-1, keepdim=True)
    before = ranked.cumsum(-1) - ranked
    keep = (before < rules.top_p[:, None]) | (rules.top_p >= 1.0)[:, None]
    ranked = ranked.where(keep, torch.zeros_like(ranked))
    ranked = ranked / ranked.sum(-1, keepdim=True)
    return torch.zeros_like(ranked).scatter(-1, order, ranked)
