"""How often a drafted token is kept, by the rule of the engine that will verify it.

A confidence is a promise about one rule. Rejection sampling keeps a token drawn from q with probability 1 - TV(p, q). Coupled
verification draws target and draft with one number, and keeps the draft where both distribution functions give the same token:
the overlap of the tokens' intervals, which is less. At temperature 0 either keeps what both find likeliest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_specdec.errors import SpecDecodeError
from deepinfer_specdec.verification.batched import inverse_cdf

RULES = ("coupled", "standard")
_CHUNK = 1 << 20  # float32 values looked at together: they stay in a processor's cache


@dataclass(frozen=True, slots=True)
class Rule:
    """A verification and the temperature of the answers.

    Attributes:
        method: `coupled` (the native engine; seeded answers do not change) or `standard` (rejection sampling, as in vLLM).
        temperature: 0 for greedy. Filters (top-p, top-k, min-p) are not modelled.
    """

    method: str = "coupled"
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.method not in RULES:
            raise SpecDecodeError(f"verification {self.method!r}; allowed: {', '.join(RULES)}")
        if not 0.0 <= self.temperature < float("inf"):
            raise SpecDecodeError(f"temperature {self.temperature}; allowed: 0 (greedy) or more")

    def probabilities(self, logits: Tensor) -> Tensor:
        """float32 [..., V] that tokens are drawn with, of logits [..., V]."""
        if self.temperature == 0.0:
            return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        return (logits.float() / self.temperature).softmax(-1)

    def kept(self, target: Tensor, draft: Tensor) -> Tensor:
        """float32 [...], probability that a drafted token is kept, of probabilities [..., V]."""
        if self.method == "standard":
            return torch.minimum(target, draft).sum(-1).clamp(0.0, 1.0)
        p, q = target.cumsum(-1), draft.cumsum(-1)
        overlap = torch.minimum(p, q)
        overlap[..., 1:] -= torch.maximum(p, q)[..., :-1]
        return overlap.clamp_min_(0.0).sum(-1).clamp_(0.0, 1.0)

    @torch.no_grad()
    def acceptance(self, target_logits: Tensor, draft_logits: Tensor) -> Tensor:
        """float32 [...], `kept` of logits [..., V]: the label of the confidence head."""
        target, draft = target_logits.flatten(0, -2), draft_logits.flatten(0, -2)
        size = max(1, _CHUNK // target.shape[-1])
        parts = [
            self.kept(self.probabilities(p), self.probabilities(q))
            for p, q in zip(target.split(size), draft.split(size), strict=True)
        ]
        return torch.cat(parts).view(target_logits.shape[:-1])

    def draw(self, target: Tensor, draft: Tensor, said: Tensor, generator: torch.Generator) -> Tensor:
        """Drafted tokens int64 [R], given what the target said there.

        Drafts and targets are drawn together, so of a text that is already there the drafts are drawn from what is left of
        the joint distribution: equal to `said` as often as the rule keeps them.

        Args:
            target, draft: probabilities [R, V].
            said: int64 [R], the target's own tokens.
            generator: of the processor, so that every device draws the same.
        """
        u = torch.rand(len(said), generator=generator, dtype=torch.float64).to(said.device)
        at = said[:, None]
        if self.method == "standard":
            p, q = target.gather(1, at)[:, 0], draft.gather(1, at)[:, 0]
            other = (draft - target).clamp_min(0.0)
            other = torch.where(other.sum(-1, keepdim=True) > 0.0, other, draft)
            v = torch.rand(len(said), generator=generator, dtype=torch.float64).to(said.device)
            return torch.where(u * p < torch.minimum(p, q), said, inverse_cdf(other, v))
        ends = target.double().cumsum(-1)
        end, width = ends.gather(1, at)[:, 0], target.gather(1, at)[:, 0]
        return inverse_cdf(draft, ((end - width * (1.0 - u)) / ends[:, -1]).clamp(0.0, 1.0 - 1e-12))
