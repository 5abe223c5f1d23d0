"""The budget inside vLLM: the best of all, from blocks two steps old, for the drafts that there are."""

from __future__ import annotations

import numpy as np
from deepinfer_specdec.adapters.vllm.planning import BudgetPlanner
from deepinfer_specdec.adapters.vllm.pricing import StepPrices
from deepinfer_specdec.scheduling.budget import StepLoad
from hypothesis import given, settings
from hypothesis import strategies as st

WIDTH = 4


def plan(planner, step, rows, prices, counts=None, others=0):
    slots = np.arange(rows)
    counts = np.full(rows, WIDTH, np.int32) if counts is None else np.asarray(counts, np.int32)
    draft = float(prices.draft.seconds(rows))
    load = StepLoad(rows=rows, other_tokens=others, draft_seconds=draft, limit=int(counts.sum()))
    return planner.budget(step, slots, counts, load, prices)


def steady(rows, confidences, steps=300):
    """A planner that has seen every row draft the same block in every step, so that its forecast is that block.

    Nearly: a forecast leans by a few blocks on the job's mean, which began at 1 and has fallen to within 3 % of the block.
    """
    planner = BudgetPlanner(rows, WIDTH)
    for step in range(steps):
        planner.record(step, np.arange(rows), np.tile(np.asarray(confidences, np.float32), (rows, 1)))
    return planner, steps + 1


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.05, 0.99), min_size=WIDTH, max_size=WIDTH),
    st.integers(1, 5),
    st.integers(0, 30),
    st.lists(st.floats(0.2, 9.0), min_size=8, max_size=8),
)
def test_the_budget_is_the_best_of_all(confidences, rows, others, costs):
    prices = StepPrices([(1, 0.7), (8, 0.9)], [(8 * (i + 1), c) for i, c in enumerate(costs)], 64)
    planner, step = steady(rows, confidences)
    got = plan(planner, step, rows, prices, others=others)

    def rate(budget):  # tokens a millisecond, counted one by one
        survivals = sorted((float(np.prod(confidences[: j + 1])) for j in range(WIDTH)), reverse=True)
        ranked = sorted(survivals * rows, reverse=True)
        bucket = costs[(rows + others + budget - 1) // 8]
        return (rows + sum(ranked[:budget])) / (bucket + float(prices.draft.seconds(rows)))

    best = max(rate(b) for b in range(rows * WIDTH + 1))
    assert rate(got) >= 0.99 * best  # a forecast that is off by under a percent costs no more than that


def test_blocks_younger_than_two_steps_do_not_move_the_budget():
    prices = StepPrices([(1, 0.1)], [(n, 4.0 + n) for n in range(1, 41)], 40)
    hopeless = np.full((4, WIDTH), 0.01, np.float32)
    planner, step = steady(4, [0.95, 0.9, 0.9, 0.9], steps=20)
    before = plan(planner, step, 4, prices)
    assert before > 8
    for last in range(step - 1, step + 40):  # from here on nothing survives
        planner.record(last, np.arange(4), hopeless)
        if last == step - 1:
            assert plan(planner, step, 4, prices) == before  # drafted in step - 1: verified in step, so it has no say
    assert plan(planner, last + 2, 4, prices) < before


def test_a_block_that_arrives_after_its_slot_was_taken_is_dropped():
    prices = StepPrices([(1, 0.1)], [(n, 4.0 + n) for n in range(1, 41)], 40)
    one, other = BudgetPlanner(2, WIDTH), BudgetPlanner(2, WIDTH)
    good = np.full((2, WIDTH), 0.9, np.float32)
    for planner in (one, other):
        for step in range(10):
            planner.record(step, np.arange(2), good)
        planner.begin(1, 10)  # a new request in step 10, while step 9's block is on its way
    one.record(9, np.array([1]), np.full((1, WIDTH), 0.01, np.float32))
    assert plan(one, 12, 2, prices) == plan(other, 12, 2, prices)


def test_drafts_that_do_not_exist_are_not_counted():
    flat = StepPrices([(1, 0.1)], [(64, 5.0)], 64)  # one graph for all: every draft pays
    planner, step = steady(3, [0.9, 0.9, 0.9, 0.9])
    assert plan(planner, step, 3, flat) == 12
    assert plan(planner, step, 3, flat, counts=[4, 1, 2]) == 7


def test_nothing_is_verified_where_it_does_not_pay():
    steep = StepPrices([(1, 0.1)], [(n, float(n * n)) for n in range(1, 41)], 40)
    planner, step = steady(4, [0.3, 0.2, 0.1, 0.1])
    assert plan(planner, step, 4, steep) == 0


def test_tokens_that_come_anyway_make_time_dearer():
    """Requests that sample without drafts wait for the step too, so they count in what it yields."""
    prices = StepPrices([(1, 0.1)], [(n, 4.0 + 0.4 * n) for n in range(1, 200)], 199)
    planner, step = steady(4, [0.7, 0.6, 0.5, 0.5])
    slots, counts = np.arange(4), np.full(4, WIDTH, np.int32)
    alone = planner.budget(step, slots, counts, StepLoad(rows=4, other_tokens=100, limit=16), prices)
    crowded = planner.budget(step, slots, counts, StepLoad(rows=104, other_tokens=0, limit=16), prices)
    assert crowded < alone
