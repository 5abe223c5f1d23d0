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

LENGTH, PROMPT, LIMIT = 300, 3, 280


@pytest.mark.parametrize(
    ("slots", "window", "block", "width"), [(1, 4, 1, 5), (1, 4, 1, 12), (1, 4, 2, 16), (4, 8, 1, 12), (8, 128, 4, 16)]
)
def test_no_step_asks_for_more_blocks_than_there_are(slots: int, window: int, block: int, width: int) -> None:
    """The tightest step budget, and every draft is kept: rows and the drafts before them reach farthest."""
    groups = (CacheGroup("kv", "prefix", 4, 8), CacheGroup("swa", "window", block, 8, window=window))
    resolved = ModelOptions("cpu", torch.float32, LENGTH, slots, slots * (width + 1), 4)
    cache = CacheManager(
        replace(_limits(EngineOptions(speculative="dspark"), groups, resolved, "bounded"), num_pages=400)
    )
    scheduler = Scheduler(SchedConfig(slots, slots * (width + 1), LENGTH, 2), cache)
    for number in range(slots):
        scheduler.add(Sequence(number, [number + 1] * PROMPT, LIMIT))
    ahead = DraftsAhead(width, lambda _step, _slots, most: int(most.sum()))
    flying, said = deque(), 0
    while scheduler.has_unfinished:
        while (plan := scheduler.plan(ahead)) is not None:
            flying.append(plan)
        plan = flying.popleft()
        kept = np.where(plan.samples, plan.drafts + 1, 0)
        said += int(kept.sum())
        scheduler.apply(plan, np.ones((plan.num_rows, width + 1), int), kept)
    assert said >= slots * (LIMIT - PROMPT)
