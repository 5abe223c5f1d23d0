"""Pools of window groups hold what rows planned ahead of their drafts need."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np
import pytest
import torch
from deepinfer_cache import CacheManager
from deepinfer_offline.engine.native.build import _limits
from deepinfer_offline.engine.options import EngineOptions
from deepinfer_offline.models.base import CacheGroup, ModelOptions
from deepinfer_sched import DraftsAhead, SchedConfig, Scheduler, Sequence

LENGTH, PROMPT, LIMIT = 300, 13, 270


@pytest.mark.parametrize(
    ("slots", "window", "block", "width"),
    [(1, 4, 1, 5), (1, 4, 1, 12), (1, 4, 2, 16), (4, 8, 1, 12), (8, 128, 4, 16), (16, 4, 1, 16)],
)
@pytest.mark.parametrize("tight", [False, True])
def test_no_step_asks_for_more_blocks_than_there_are(
    slots: int, window: int, block: int, width: int, tight: bool
) -> None:
    """A step budget for all drafts or for hardly any, and every verified draft is kept: rows and the drafts before them reach
    farthest. Prompts take the tokens that are left.
    """
    tokens = slots + width if tight else slots * (width + 1)
    groups = (CacheGroup("kv", "prefix", 4, 8), CacheGroup("swa", "window", block, 8, window=window))
    resolved = ModelOptions("cpu", torch.float32, LENGTH, slots, tokens, 4)
    cache = CacheManager(
        replace(_limits(EngineOptions(speculative="dspark"), groups, resolved, "bounded"), num_pages=400)
    )
    scheduler = Scheduler(SchedConfig(slots, tokens, LENGTH, 2), cache)
    for number in range(2 * slots):
        scheduler.add(Sequence(number, [number + 1] * PROMPT, LIMIT))
    ahead = DraftsAhead(width, lambda _step, _slots, most, _room: int(most.sum()))
    flying, said, spread = deque(), 0, 0
    while scheduler.has_unfinished:
        while (plan := scheduler.plan(ahead)) is not None:
            flying.append(plan)
            assert plan.num_tokens <= tokens
            spread = max(spread, int(plan.counts.sum()))
        plan = flying.popleft()
        left = plan.ahead.budget - (np.cumsum(plan.drafts) - plan.drafts)  # the first rows verify all that they may
        kept = np.where(plan.samples, np.clip(left, 0, plan.drafts) + 1, 0)
        said += int(kept.sum())
        scheduler.apply(plan, np.ones((plan.num_rows, width + 1), int), kept)
    assert said >= 2 * slots * (LIMIT - PROMPT)
    assert spread > tokens or not tight or slots == 1
