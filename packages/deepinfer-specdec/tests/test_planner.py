"""The plan of an asynchronous step: the best budget of all, from blocks two steps old, for the drafts that there are."""

from __future__ import annotations

import numpy as np
import pytest
from deepinfer_specdec import CostCurve, VerificationPlanner
from deepinfer_specdec.errors import SpecDecodeError
from deepinfer_specdec.scheduling.relay import SurvivalRelay
from deepinfer_specdec.simulation.throughput import (
    Workload,
    fixed_length,
    live_lookahead,
    paper_early_stop,
    paper_production,
    planned,
    tokens_per_second,
    v4_flash_draft,
    v4_flash_verify,
)
from hypothesis import given, settings
from hypothesis import strategies as st

WIDTH = 4
SURE, HOPELESS = np.full((2, WIDTH), 0.9), np.full((2, WIDTH), 0.01)


def linear(rows: int, per_token: float = 1.0, most: int = 64) -> np.ndarray:
    """Seconds of steps with 0..most drafts where a token takes `per_token` after the first 4 s."""
    return 4.0 + per_token * (rows + np.arange(most + 1))


def seen(survivals: np.ndarray, edge: float = 0.0) -> VerificationPlanner:
    """A planner that knows the block `survivals` [R, K] of step 0."""
    planner = VerificationPlanner(len(survivals), WIDTH, edge)
    planner.record(0, np.arange(len(survivals)), survivals)
    return planner


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(0, 30))
def test_the_budget_is_the_best_of_all(seed: int, rows: int, others: int) -> None:
    """Jagged times, ragged rows, and rows that sample without drafts, counted one by one."""
    rng = np.random.default_rng(seed)
    survivals = np.cumprod(rng.uniform(0.05, 1.0, (rows, WIDTH)), axis=1).astype(np.float32)
    counts = rng.integers(0, WIDTH + 1, rows)
    seconds = rng.uniform(0.5, 1.5, int(counts.sum()) + 1)
    ranked = sorted((float(survivals[r, k]) for r in range(rows) for k in range(counts[r])), reverse=True)
    rates = [(rows + others + sum(ranked[:b])) / seconds[b] for b in range(len(ranked) + 1)]
    got = seen(survivals).budget(2, np.arange(rows), seconds, rows + others, counts)
    assert rates[got] == pytest.approx(max(rates), rel=1e-6)  # survivals are float32


def test_blocks_younger_than_two_steps_do_not_move_the_budget() -> None:
    planner, slots = VerificationPlanner(4, WIDTH), np.arange(4)
    sure, hopeless = np.tile(SURE, (2, 1)), np.tile(HOPELESS, (2, 1))
    for step in range(4):
        planner.record(step, slots, sure)
    before = planner.budget(5, slots, linear(4))
    assert before == 4 * WIDTH
    planner.record(4, slots, hopeless)  # drafted in step 4: verified in step 5, so it has no say there
    assert planner.budget(5, slots, linear(4)) == before
    assert planner.budget(6, slots, linear(4)) == 0
    planner.record(5, slots, sure)
    assert planner.budget(6, slots, linear(4)) == 0
    with pytest.raises(SpecDecodeError, match="allowed: >= 2"):
        SurvivalRelay(1, 2, lag=1)


def test_a_row_that_misses_steps_counts_by_its_last_block() -> None:
    planner = VerificationPlanner(2, WIDTH)
    planner.record(0, np.arange(2), np.concatenate([SURE[:1], HOPELESS[:1]]))
    for step in range(1, 9):
        planner.record(step, np.array([0]), SURE[:1])
    expected = planner.expected(20, np.arange(2))
    np.testing.assert_allclose(np.diff(expected), [*[0.9] * 4, *[0.01] * 4], rtol=1e-6)


def test_what_a_slot_drafted_for_its_former_sequence_does_not_count() -> None:
    planner, slots = VerificationPlanner(4, 1), np.arange(4)
    for step in range(3):
        planner.record(step, slots, np.full((4, 1), 0.1 if step == 0 else 0.01))
    planner.begin(1, 4)
    planner.record(3, slots, np.full((4, 1), 0.01))  # on its way when the slot was given away
    np.testing.assert_allclose(np.diff(planner.expected(5, slots)), [0.1, 0.01, 0.01, 0.01], rtol=1e-6)
    planner.record(4, slots, np.full((4, 1), 0.9))
    np.testing.assert_allclose(np.diff(planner.expected(6, slots)), [0.9] * 4, rtol=1e-6)


def test_a_sequence_begins_as_others_began_and_the_first_one_as_certain() -> None:
    planner, new = VerificationPlanner(50, 2), np.array([49])

    def begins(step: int) -> list[float]:
        return np.diff(planner.expected(step, new)).tolist()

    older = begins(7)
    assert older == [1.0, 1.0]
    firsts = np.random.default_rng(0).uniform(size=(40, 2)).astype(np.float32)
    firsts[:, 1] *= firsts[:, 0]
    for step in range(40):
        planner.record(step, np.array([step]), firsts[step : step + 1])
        planner.record(step, np.array([step // 2]), np.full((1, 2), 0.99))  # not its first
        seen = firsts[: step + 1][-32:]
        quartile = [sorted(column)[3 * len(column) // 4] for column in seen.T.tolist()]
        assert begins(step + 2) == pytest.approx(quartile)
        if step < 32:  # the block of the step before is too young
            assert begins(step + 1) == pytest.approx(older)
        older = quartile


def test_each_sequence_of_a_slot_has_a_first_block_and_what_is_on_its_way_from_the_former_one_is_none() -> None:
    planner, slot, other = VerificationPlanner(2, 1), np.array([0]), np.array([1])
    planner.record(0, slot, np.full((1, 1), 0.3))
    planner.begin(0, 5)
    planner.record(4, slot, np.full((1, 1), 0.5))
    assert planner.expected(9, other)[1] == pytest.approx(0.3)
    planner.record(5, slot, np.full((1, 1), 0.6))
    assert planner.expected(9, other)[1] == pytest.approx(0.6)


def test_drafts_that_do_not_exist_and_those_that_do_not_fit_are_not_verified() -> None:
    planner, slots = seen(np.full((3, WIDTH), 0.9)), np.arange(3)
    flat = np.full(64, 5.0)  # one graph for all: every draft pays
    assert planner.budget(2, slots, flat) == 12
    assert planner.budget(2, slots, flat, counts=np.array([4, 1, 2])) == 7
    assert planner.budget(2, slots, flat[:6]) == 5
    assert planner.budget(2, slots[:0], flat) == 0


def test_drafts_must_beat_plain_decoding_by_the_edge() -> None:
    seconds = np.array([1.0, *[1.4] * (2 * WIDTH)])  # 2 tokens, or 2 + 8 * 0.1 in 1.4 times the time: as fast
    barely = np.full((2, WIDTH), 0.1 + 1e-3)
    assert seen(barely).budget(2, np.arange(2), seconds) == 2 * WIDTH
    assert seen(barely, edge=0.02).budget(2, np.arange(2), seconds) == 0
    with pytest.raises(SpecDecodeError, match="edge -1"):
        VerificationPlanner(1, 1, -1.0)


def test_tokens_that_come_anyway_make_time_dearer() -> None:
    """Requests that sample without drafts wait for the step too, so they count in what it yields."""
    planner, slots = seen(np.cumprod(np.tile([0.7, 0.6, 0.5, 0.5], (4, 1)), axis=1)), np.arange(4)
    seconds = 4.0 + 0.4 * (104 + np.arange(17))
    assert planner.budget(2, slots, seconds, rows=104) < planner.budget(2, slots, seconds, rows=4)


def test_few_rows_average_their_blocks() -> None:
    planner = VerificationPlanner(4, 1)
    for step in range(10):
        planner.record(step, np.arange(4), np.full((4, 1), step / 10))
    for rows, blocks in ((1, range(4, 10)), (2, range(7, 10)), (3, range(8, 10)), (4, range(9, 10))):
        expected = np.diff(planner.expected(11, np.arange(rows)))
        np.testing.assert_allclose(expected, np.mean(blocks) / 10, rtol=1e-6)
    young = VerificationPlanner(1, 1)
    young.record(0, np.arange(1), np.full((1, 1), 0.4))
    young.record(1, np.arange(1), np.full((1, 1), 0.8))
    assert [float(young.expected(step, np.arange(1))[1]) for step in (1, 2, 3)] == pytest.approx([1.0, 0.4, 0.6])


@pytest.mark.parametrize("rows", [4, 32])
def test_among_rows_that_go_on_the_planner_is_the_papers_production_rule(rows: int) -> None:
    """Step by step, beside the simulator's own account of it."""
    verify, draft = v4_flash_verify(), v4_flash_draft()
    ours, papers = planned(verify, draft, rows, 7), paper_production(verify, draft)
    budgets = set()

    def both(step, block, replaced):
        mine, theirs = ours(step, block, replaced), papers(step, block, replaced)
        np.testing.assert_array_equal(mine.lengths, theirs.lengths)
        budgets.add(int(mine.lengths.sum()))
        return mine

    load = Workload(rows, between=1.0, within=1.0, life=10**9)
    tokens_per_second(both, load, verify, steps=200)
    assert len(budgets) > 2, "budgets hardly vary: the test shows little"


@pytest.mark.parametrize(("rows", "gain"), [(4, 1.02), (16, 1.1), (64, 1.1)])
def test_short_answers_are_not_taken_for_certain(rows: int, gain: float) -> None:
    """Of three steps, with poor drafts: where a row is certain until it is known, most of what is verified is in vain."""
    verify, draft = v4_flash_verify(), v4_flash_draft()
    load = Workload(rows, mean_logit=-2.0, within=1.0, life=3)
    ours, papers = (
        tokens_per_second(policy, load, verify, steps=300)
        for policy in (planned(verify, draft, rows, 7), paper_production(verify, draft))
    )
    assert ours >= gain * papers


@pytest.mark.parametrize(
    ("rows", "load"), [(16, {}), (64, {"kinds": (2.0, -2.0), "within": 0.5}), (256, {"within": 1.0})]
)
def test_simulated_policies_against_algorithm_1(rows: int, load: dict) -> None:
    """`benchmarks/cases/specdec_simulation.py` has the whole table."""
    verify, draft, work = v4_flash_verify(), v4_flash_draft(), Workload(rows, **load)

    def speed(policy) -> float:
        return tokens_per_second(policy, work, verify, steps=120)

    ours = speed(planned(verify, draft, rows, 7))
    assert ours >= speed(paper_early_stop(verify, draft))
    assert speed(live_lookahead(verify, draft)) >= speed(paper_early_stop(verify, draft))
    if "kinds" in load:
        assert ours >= 1.05 * max(speed(fixed_length(k, draft)) for k in range(8))


def test_nothing_is_verified_where_it_cannot_pay() -> None:
    verify, draft = CostCurve([1, 64], [0.1, 6.4]), CostCurve([1, 8], [0.1, 0.1])
    lengths = []
    policy = planned(verify, draft, 8, WIDTH)

    def watched(step, block, replaced):
        decision = policy(step, block, replaced)
        lengths.append(int(decision.lengths.sum()))
        return decision

    tokens_per_second(watched, Workload(8, mean_logit=0.0, life=10**9), verify, width=WIDTH, steps=20)
    assert lengths[0] > 0, "nothing is known yet"
    assert not any(lengths[1:])
