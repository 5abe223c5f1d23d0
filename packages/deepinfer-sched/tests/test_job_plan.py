"""Orders of whole jobs."""

from __future__ import annotations

import random

import numpy as np
import pytest
from deepinfer_sched import SchedConfigError, plan_blocks, plan_job, plan_windows, replay_lru
from hypothesis import given
from hypothesis import strategies as st

requests_strategy = st.lists(st.lists(st.integers(0, 2), max_size=10), max_size=20)


@given(requests_strategy, st.integers(1, 3))
def test_requests_with_a_common_prefix_are_neighbours(requests, block_size):
    order = plan_job(requests, block_size=block_size).order.tolist()
    assert sorted(order) == list(range(len(requests)))
    for length in range(block_size, 11, block_size):
        heads = [tuple(requests[i][:length]) for i in order if len(requests[i]) >= length]
        runs = [head for place, head in enumerate(heads) if place == 0 or heads[place - 1] != head]
        assert len(runs) == len(set(runs)), f"prefixes of {length} tokens are split"


@given(requests_strategy, st.data())
def test_longest_expected_output_first_among_siblings(requests, data):
    outputs = data.draw(st.lists(st.integers(0, 5), min_size=len(requests), max_size=len(requests)))
    order = plan_job(requests, block_size=1, outputs=outputs).order.tolist()
    firsts = {}
    for i in order:
        head = tuple(requests[i][:1])
        firsts.setdefault(head, []).append(outputs[i])
    groups = [max(values) for head, values in firsts.items() if head]
    assert groups == sorted(groups, reverse=True)


def test_equal_requests_run_longest_output_first_then_in_input_order():
    assert plan_job([[1, 2]] * 4, block_size=1, outputs=[1, 9, 1, 9]).order.tolist() == [1, 3, 0, 2]


def test_heavier_group_first():
    small, large = [1, 1], [2] * 8
    plan = plan_job([[*small, 5], [*large, 5], [*small, 6], [*large, 6]], block_size=1)
    assert plan.order.tolist() == [1, 3, 0, 2]


def test_bound_and_shared_prefixes_of_a_known_job():
    shared = list(range(100, 132))
    plan = plan_job([[*shared, i] for i in range(5)] + [[7] * 16], block_size=16)
    assert plan.tree.total_blocks == 11
    assert plan.bound == pytest.approx(8 / 11)
    assert plan.saved_tokens == 8 * 16
    prefix = plan.shared_prefixes()[0]
    assert (prefix.tokens, prefix.requests, prefix.saved_tokens, prefix.example) == (32, 5, 128, 0)


def test_a_trace_of_ids_is_planned_like_the_tokens_it_stands_for():
    rng = random.Random(0)
    ids = [[rng.randrange(3) for _ in range(rng.randrange(6))] for _ in range(50)]
    tokens = [[token for block in blocks for token in (block, block)] for blocks in ids]
    from_ids, from_tokens = plan_blocks(ids, block_size=2), plan_job(tokens, block_size=2)
    assert from_ids.tree.distinct_blocks == from_tokens.tree.distinct_blocks
    assert from_ids.bound == from_tokens.bound


def test_windows_cover_the_job_in_order():
    requests = [[i % 3] * 4 for i in range(10)]
    windows = list(plan_windows(requests, 4, block_size=2))
    assert [first for first, _ in windows] == [0, 4, 8]
    assert sorted(first + i for first, plan in windows for i in plan.order.tolist()) == list(range(10))


def test_planned_reaches_the_bound_where_arrival_order_finds_nothing():
    rng = random.Random(0)
    job = [[group, *range(1000 * group, 1000 * group + 30), 10_000 + i] for i in range(8) for group in range(40)]
    rng.shuffle(job)
    plan = plan_blocks(job, block_size=16)
    total = plan.tree.total_blocks
    assert replay_lru(plan.tree, plan.order, 64) / total == pytest.approx(plan.bound)
    assert replay_lru(plan.tree, np.arange(len(job)), 64) / total < 0.1


@pytest.mark.parametrize("wrong", [{"block_size": 0}, {"block_size": 4, "outputs": [1, 2]}])
def test_wrong_arguments_are_named(wrong):
    with pytest.raises(SchedConfigError, match=r"block_size 0|2 outputs"):
        plan_job([[1]], **wrong)
