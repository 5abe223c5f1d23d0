"""Steps whose drafts are shared out on the device: what their bounds reserve, and who gets what they do not use."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from deepinfer_sched import DraftsAhead, SchedConfig, SchedError, Scheduler, Sequence

deepinfer_cache = pytest.importorskip("deepinfer_cache")
PAGE = 4


def make(pages=64, running=4, tokens=32, **options):
    groups = (deepinfer_cache.CacheGroup("kv", "prefix", PAGE),)
    config = deepinfer_cache.CacheConfig(groups, pages, running, 64, max_tokens_per_step=tokens)
    return Scheduler(
        SchedConfig(running, tokens, 64, cascade_min_rows=0, **options), deepinfer_cache.CacheManager(config)
    )


def decode(scheduler, rows, ahead, length=3, answer=40):
    """Sequences past their prompts, whose last step has drafted."""
    for number in range(rows):
        scheduler.add(Sequence(number, [number + 1] * length, answer))
    plan = scheduler.plan(ahead)
    assert plan.samples.tolist() == [True] * rows
    scheduler.apply(plan, np.full((rows, 1), 7), np.ones(rows, int))


def ahead(budget, width=6):
    return DraftsAhead(width, lambda _step, _slots, _most, _room: budget)


def test_prompts_get_the_tokens_that_a_budget_leaves():
    """Two rows may verify six drafts each, and verify three in all: the prompt has 32 - 2 - 3 tokens, not 32 - 14."""
    scheduler = make()
    decode(scheduler, 2, ahead(0))
    scheduler.add(Sequence(9, [50] * 60, 2))
    plan = scheduler.plan(ahead(3))
    assert plan.counts.tolist() == [4, 4, 27]
    assert plan.num_tokens == 32


def test_a_row_reserves_no_more_than_all_rows_verify():
    scheduler = make()
    decode(scheduler, 2, ahead(0), length=8)  # two pages
    plan = scheduler.plan(ahead(0))
    assert plan.drafts.tolist() == [0, 0]
    assert scheduler.cache.held_pages(plan.slots).tolist() == [3, 3]
    assert scheduler.plan(ahead(2)).drafts.tolist() == [2, 2]
    assert scheduler.cache.held_pages(plan.slots).tolist() == [3, 3]  # position 9, and two behind it
    assert scheduler.state.slack.tolist() == [2, 2, 0, 0]


def test_a_budget_is_cut_to_the_tokens_of_a_step():
    scheduler = make(running=2, tokens=6)
    decode(scheduler, 2, ahead(0))
    plan = scheduler.plan(ahead(12))
    assert (plan.ahead.budget, plan.num_tokens, plan.drafts.tolist()) == (4, 6, [4, 4])


def test_prompts_that_wait_keep_their_share():
    scheduler = make(running=3, tokens=12, prompt_share=0.5)
    decode(scheduler, 2, ahead(0))
    scheduler.add(Sequence(9, [50] * 20, 2))
    plan = scheduler.plan(ahead(12))
    assert (plan.ahead.budget, plan.counts.tolist()) == (5, [6, 6, 5])


@pytest.mark.parametrize("on_device", [True, False])
def test_drafts_give_way_before_a_sequence_does(on_device):
    """Seven pages, and two rows that need three each: the first may have six drafts, the second the three of its page."""
    scheduler = make(pages=7)
    decode(scheduler, 2, ahead(0), length=8, answer=12)
    if not on_device:
        scheduler.propose(0, 6)
        scheduler.propose(1, 6)
    plan = scheduler.plan(ahead(12) if on_device else None)
    assert plan.counts.tolist() == [7, 4]
    assert not plan.preempted
    assert plan.ahead is None or plan.ahead.budget == 9


def test_a_budget_that_rows_cannot_verify_is_refused():
    scheduler = make()
    decode(scheduler, 2, ahead(0))
    with pytest.raises(SchedError, match="a budget of 13 drafts; its rows may verify 0 to 12"):
        scheduler.plan(ahead(13))


def test_nobody_is_asked_for_a_budget_without_decode_rows():
    scheduler = make()
    asked = []
    scheduler.add(Sequence(0, [1] * 3, 4))
    plan = scheduler.plan(DraftsAhead(6, lambda step, slots, most, room: asked.append(step) or 0))
    assert plan.ahead.budget == 0
    assert not asked


def test_bounds_fall_together_when_drafts_are_rejected():
    """Steps ahead of each other: what the oldest one's rows did not keep is taken back, and all of it at the end."""
    scheduler = make(running=2)
    decode(scheduler, 2, ahead(0))
    flights = deque()
    for _ in range(8):
        while (plan := scheduler.plan(ahead(4))) is not None:
            flights.append(plan)
        plan = flights.popleft()
        scheduler.apply(plan, np.full((2, 5), 7), np.ones(2, int))
        state = scheduler.state
        assert state.slack.tolist() == [sum(4 for _ in flights)] * 2
        assert (state.computed - state.slack == state.length - 1 + len(flights)).all()
