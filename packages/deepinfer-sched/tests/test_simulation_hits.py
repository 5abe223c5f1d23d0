"""The segment replay against plain caches of single blocks, written independently."""

from __future__ import annotations

import numpy as np
from deepinfer_sched import plan_blocks, replay_lru, replay_next_use
from hypothesis import given
from hypothesis import strategies as st

jobs = st.lists(st.lists(st.integers(0, 2), max_size=9), min_size=1, max_size=16)
capacities = st.integers(0, 24)


def prefixes(request):
    return [tuple(request[: i + 1]) for i in range(len(request))]


def plain_lru(requests, capacity, heads_last):
    """A list of blocks, most recent first."""
    stack, hits = [], 0
    for request in requests:
        blocks = prefixes(request)
        for block in blocks:
            if block not in stack:
                break
            hits += 1
        used = blocks if heads_last else blocks[::-1]
        stack = (used + [block for block in stack if block not in blocks])[:capacity]
    return hits


def plain_min(requests, capacity):
    """Evicts the block whose next use is farthest; of equals the deepest."""
    resident, hits = set(), 0
    for place, request in enumerate(requests):
        blocks = prefixes(request)
        for block in blocks:
            if block not in resident:
                break
            hits += 1
        resident.update(blocks)

        def badness(block, place=place):
            later = [i for i in range(place + 1, len(requests)) if block in prefixes(requests[i])]
            return (later[0] if later else 10**9, len(block))

        while len(resident) > capacity:
            resident.remove(max(resident, key=badness))
    return hits


@given(jobs, capacities, st.booleans())
def test_lru(requests, capacity, heads_last):
    plan = plan_blocks(requests, block_size=1)
    for order in (np.arange(len(requests)), plan.order):
        found = replay_lru(plan.tree, order, capacity, heads_last=heads_last)
        assert found == plain_lru([requests[i] for i in order], capacity, heads_last)


@given(jobs, capacities)
def test_next_use(requests, capacity):
    plan = plan_blocks(requests, block_size=1)
    assert replay_next_use(plan.tree, np.arange(len(requests)), capacity) == plain_min(requests, capacity)


@given(jobs, capacities)
def test_next_use_is_never_worse_and_nothing_beats_the_bound(requests, capacity):
    plan = plan_blocks(requests, block_size=1)
    arrival = np.arange(len(requests))
    lru = replay_lru(plan.tree, arrival, capacity, heads_last=True)
    best = replay_next_use(plan.tree, arrival, capacity)
    endless = plan.tree.total_blocks - plan.tree.distinct_blocks
    assert replay_lru(plan.tree, arrival, capacity) <= best
    assert lru <= best <= endless
    assert replay_lru(plan.tree, arrival, plan.tree.distinct_blocks) == endless
