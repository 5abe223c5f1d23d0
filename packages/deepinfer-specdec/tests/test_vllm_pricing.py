"""Prices inside vLLM: graph buckets and dips stay, real steps correct them, one odd step does not."""

from __future__ import annotations

import numpy as np
import pytest
from deepinfer_specdec.adapters.vllm.pricing import StepPrices
from hypothesis import given, settings
from hypothesis import strategies as st

DRAFT = [(1, 0.5), (8, 1.0)]
VERIFY = [(8, 5.0), (16, 9.0), (24, 7.0), (32, 12.0), (64, 30.0), (128, 50.0)]  # the dip at 24 is real: a better tile
GRAPHS = 32


def prices():
    return StepPrices(DRAFT, VERIFY, GRAPHS)


def test_buckets_are_steps_dips_stay_and_beyond_the_graphs_cost_is_linear():
    cost = prices().verify.seconds
    assert cost(np.array([1, 8, 9, 16, 17, 24, 25, 32])).tolist() == [5, 5, 9, 9, 7, 7, 12, 12]
    assert cost(96) == pytest.approx(40.0)
    assert prices().draft.seconds(np.array([1, 2, 8])).tolist() == [0.5, 1.0, 1.0]


def visit(costs, steps, requests=8):
    """Run `steps`, (tokens, milliseconds of verification), and take what was learned into use."""
    for tokens, milliseconds in steps:
        costs.observe(requests, tokens, milliseconds + float(costs.draft.seconds(requests)))
    costs.update(*costs.refreshed())
    return costs.verify.seconds


def test_a_visited_bucket_costs_what_it_took_and_its_neighbours_follow():
    cost = visit(prices(), [(12, 18.0), (13, 18.4), (16, 17.6)])
    assert cost(10) == pytest.approx(18.0)
    assert cost(24) == pytest.approx(14.0)  # twice the profile, as next door
    assert cost(128) == pytest.approx(100.0)


def test_ratios_run_between_visited_buckets():
    cost = visit(prices(), [(8, 5.0)] * 3 + [(32, 36.0)] * 3)  # as profiled, and three times the profile
    assert cost(8) == pytest.approx(5.0)
    assert cost(32) == pytest.approx(36.0)
    assert cost(16) == pytest.approx(9.0 * 2.0)  # half way from 8 to 32 by ratio


def test_two_steps_are_no_evidence_and_one_odd_step_in_many_changes_nothing():
    assert visit(prices(), [(8, 50.0)] * 2)(8) == 5.0
    assert visit(prices(), [(8, 6.0)] * 20 + [(8, 900.0)])(8) == pytest.approx(6.0)


def test_learning_twice_does_not_compound():
    costs = prices()
    for _ in range(3):
        cost = visit(costs, [(8, 10.0)] * 3)
    assert cost(8) == pytest.approx(10.0)


def test_what_drafting_adds_is_what_a_step_with_it_takes_more_than_its_neighbours_without():
    """The profile says 1 ms at 8 requests, the clock 0.25: the drafter's context is kept without drafts as well."""
    costs = prices()
    for _ in range(4):
        for _ in range(6):
            costs.observe(8, 8, 6.0, drafted=False)
        costs.observe(8, 8, 6.25)
    costs.update(*costs.refreshed())
    assert costs.draft.seconds(np.array([1, 8])) == pytest.approx([0.125, 0.25])
    assert costs.verify.seconds(8) == pytest.approx(6.0)


def test_drafting_that_takes_no_time_is_free_and_one_odd_look_says_nothing():
    costs = prices()
    for took in (5.9, 6.0, 6.1, 50.0, 5.8):
        for _ in range(3):
            costs.observe(8, 8, 6.0, drafted=False)
        costs.observe(8, 8, took)
    draft, _ = costs.refreshed()
    assert draft == [(1, 0.0), (8, 0.0)]
    costs.update(*costs.refreshed())
    assert 0.0 < costs.draft.seconds(8) < 1e-5


def test_what_is_left_for_verification_is_never_nothing():
    """At one request drafting adds 2.5 times its profile, at 64 less than it: one ratio for both would leave -1 ms of 11."""
    costs = StepPrices([(1, 1.0), (64, 6.0)], [(8, 5.0), (64, 6.0), (128, 8.0)], 128)
    for _ in range(4):
        for _ in range(4):
            costs.observe(1, 8, 5.0, drafted=False)
        costs.observe(1, 8, 7.5)
    for _ in range(5):
        costs.observe(64, 64, 11.0)
    costs.update(*costs.refreshed())
    assert costs.draft.seconds(64) == pytest.approx(12.0)
    assert costs.verify.seconds(64) == pytest.approx(11.0 / 4)


def test_graphs_that_were_not_profiled_are_none():
    costs = StepPrices(DRAFT, VERIFY, 512)
    assert costs.verify.seconds(20) == pytest.approx(8.0)  # between 16 and 24
    profiled = float(costs.verify.seconds(300))
    assert visit(costs, [(300, 2.0 * profiled)] * 3)(64) == pytest.approx(2.0 * 30.0)


def test_steps_with_drafts_are_not_compared_with_those_of_long_ago_nor_of_another_size():
    costs = prices()
    for _ in range(6):
        costs.observe(8, 8, 6.0, drafted=False)
        costs.observe(8, 24, 30.0, drafted=True)  # another size, which never ran without
    for _ in range(100):
        costs.observe(8, 16, 9.0)
    for _ in range(9):
        costs.observe(8, 8, 20.0)  # contexts have grown meanwhile
    draft, _ = costs.refreshed()
    assert draft == DRAFT


def test_one_step_without_drafts_does_not_bring_those_of_long_ago_back():
    costs = prices()
    for _ in range(4):
        for _ in range(3):
            costs.observe(8, 8, 6.0, drafted=False)
        for _ in range(100):
            costs.observe(8, 16, 9.0)
        costs.observe(8, 8, 12.0, drafted=False)
        costs.observe(8, 8, 12.5)
        for _ in range(100):
            costs.observe(8, 16, 9.0)
    draft, _ = costs.refreshed()
    assert draft == DRAFT


@pytest.mark.parametrize("milliseconds", [0.0, 0.4, -3.0, float("nan"), float("inf")])
def test_a_time_that_cannot_be_is_ignored(milliseconds):
    costs = prices()
    for _ in range(5):
        costs.observe(8, 8, milliseconds)
    assert costs.observed == 0
    assert costs.refreshed() == (DRAFT, VERIFY)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 400), st.floats(0.1, 50.0)), min_size=1, max_size=12, unique_by=lambda p: p[0]),
    st.floats(0.25, 8.0),
    st.data(),
)
def test_a_machine_that_is_slower_by_a_factor_is_priced_by_that_factor(points, factor, data):
    points = sorted(points)
    limit = data.draw(st.sampled_from([0, *(size for size, _ in points)]))
    costs = StepPrices([(1, 1e-3)], points, limit)
    before = costs.verify.seconds(np.arange(500))
    for size, milliseconds in points:
        for _ in range(3):
            costs.observe(1, size, milliseconds * factor + 1e-3)
    costs.update(*costs.refreshed())
    assert costs.verify.seconds(np.arange(500)) == pytest.approx(before * factor, rel=1e-5)
