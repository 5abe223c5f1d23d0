"""Counting what a step did."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from deepinfer_offline.engine.base import EngineStats
    from deepinfer_offline.engine.native.results import StepResult


def count_step(stats: EngineStats, result: StepResult) -> None:
    """Add a step to the counters, in place."""
    plan = result.plan
    stats.steps += 1
    stats.computed_prompt_tokens += int(plan.counts[plan.prefills].sum())
    stats.preemptions += len(plan.preempted)
    stats.drafted_tokens += int(result.verified.sum())
    if result.verified.any():
        checked = result.verified > 0
        stats.verify_steps += int(checked.sum())
        stats.accepted_tokens += int(np.maximum(result.num_tokens - 1, 0)[checked].sum())
    if plan.prefills.any():
        stats.prefill_seconds += result.seconds
    else:
        stats.decode_seconds += result.seconds
