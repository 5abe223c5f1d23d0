"""What a step takes on a device, in seconds: a straight line through what a profile shows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deepinfer_sched.errors import SchedConfigError
from deepinfer_sched.step import StepPlan


@dataclass(frozen=True, slots=True)
class CostModel:
    """Linear cost of a step. All values are seconds.

    Attributes:
        step: any step, however small (launches, reading the weights).
        token: each computed token, prompt or decode.
        kv_token: each cached token that a decode row reads; a cascade reads its prefix once.
        prompt_pair: each (query, key) pair of a prompt's attention.
    """

    step: float = 5e-3
    token: float = 2e-5
    kv_token: float = 2e-8
    prompt_pair: float = 1e-10

    def __post_init__(self) -> None:
        for name in ("step", "token", "kv_token", "prompt_pair"):
            if getattr(self, name) < 0:
                raise SchedConfigError(f"{name} {getattr(self, name)} must not be negative")

    def seconds(self, plan: StepPlan) -> float:
        """Time of one step."""
        ends = plan.starts.astype(np.int64) + plan.counts
        read = int(ends[~plan.prefills].sum()) - sum((len(c.rows) - 1) * c.tokens for c in plan.cascades)
        counts = plan.counts[plan.prefills].astype(np.int64)
        pairs = int((counts * (plan.starts[plan.prefills] + (counts + 1) / 2)).sum())
        return self.step + self.token * plan.num_tokens + self.kv_token * read + self.prompt_pair * pairs
