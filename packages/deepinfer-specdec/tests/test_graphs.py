"""Prices of drafts on engines that pad steps to captured graphs: jags below the largest graph, a cliff behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from deepinfer_specdec.errors import CostCurveError
from deepinfer_specdec.scheduling.budget import EDGE, best_budget
from deepinfer_specdec.scheduling.costs import StepCosts, ahead_costs
from deepinfer_specdec.scheduling.graphs import GraphSizes
from deepinfer_specdec.simulation.throughput import (
    Simulated,
    Workload,
    learned,
    planned,
    tokens_per_second,
    v4_flash_draft,
    v4_flash_verify,
)
from hypothesis import given, settings
from hypothesis import strategies as st

ROWS, WIDTH = 64, 7
GRAPHS = [*range(8, 129, 8), *range(144, 257, 16)]
DRAFTS = np.arange(ROWS * WIDTH + 1)
TOKENS = ROWS + np.append(0.0, np.cumsum(np.repeat(0.8 ** np.arange(1, WIDTH + 1), ROWS)))  # 80 % of drafts are kept

Seconds = Callable[[int], float]
"""Tokens of a step -> seconds that it takes."""


def engine(graph: Seconds, beyond: Seconds) -> Seconds:
    """An engine with `GRAPHS`: a step takes what its graph takes, and beyond the largest what its tokens take."""

    def seconds(tokens: int) -> float:
        return graph(min(size for size in GRAPHS if size >= tokens)) if tokens <= GRAPHS[-1] else beyond(tokens)

    return seconds


def line(tokens: int) -> float:
    return 0.010 + 2e-5 * tokens


def eager(tokens: int) -> float:
    return 0.080 + 2e-5 * tokens


CLIFF = engine(line, eager)


def run(costs: StepCosts, seconds: Seconds, steps: int, tokens: np.ndarray = TOKENS) -> list[int]:
    """The budgets of `steps` steps, each the one with the most tokens a second by what is learned. A step is planned before it
    is known what the one before took, as in a loop that runs ahead.
    """
    budgets: list[int] = []
    for _ in range(steps):
        budget = best_budget(tokens - ROWS, ROWS, costs.drafting(ROWS, DRAFTS[-1]), EDGE) if costs.known else 0
        if budgets:
            costs.observe(ROWS, budgets[-1], seconds(ROWS + budgets[-1]))
        budgets.append(budget)
    return budgets


def best(seconds: Seconds, tokens: np.ndarray = TOKENS) -> int:
    return int((tokens / np.array([seconds(ROWS + int(drafts)) for drafts in DRAFTS])).argmax())


def test_drafts_that_fit_into_the_same_graph_cost_the_same() -> None:
    costs = ahead_costs(builds=False, graphs=GRAPHS)
    for _ in range(4):
        costs.observe(60, 0, 0.010)
        costs.observe(60, 50, 0.014)  # 110 of 112 tokens
        costs.observe(60, 70, 0.016)  # 130 of 144
    extra = costs.extra(60, 196)
    assert extra[:5] == pytest.approx(0.0), "60 rows run as 64"
    assert extra[45:53] == pytest.approx(0.004), "105 to 112 tokens"
    assert extra[69:85] == pytest.approx(0.006), "129 to 144"
    sizes = np.flatnonzero(np.diff(extra)) + 60
    assert set(sizes.tolist()) == set(GRAPHS[7:-1]), "prices change where a graph is full"


def test_a_step_with_drafts_in_the_graph_of_a_plain_one_says_what_plain_ones_take() -> None:
    costs = ahead_costs(builds=False, graphs=GRAPHS)
    costs.observe(60, 0, 0.030)  # held up
    costs.observe(60, 4, 0.010)
    assert costs.alone(60) == pytest.approx(0.010)


def test_a_cliff_is_seen_from_neither_side() -> None:
    """Behind 256 tokens a step takes six times as long. Prices before it are right after it was measured, and the other way
    around: within 2 % of the step, since the line between graphs is true here and the jump was measured at another size. Where
    nothing ran, 4 % less: that is hoped.
    """
    costs = ahead_costs(builds=False, graphs=GRAPHS)
    for drafts in (0, 0, 8, 8, 8, 160, 160, 160, 230, 230, 260, 230):
        costs.observe(ROWS, drafts, CLIFF(ROWS + drafts))
    prices = costs.drafting(ROWS, DRAFTS[-1])
    for drafts in (8, 160, 193, 200, 300, 448):
        assert prices[drafts] == pytest.approx(CLIFF(ROWS + drafts), rel=0.02), drafts
    for drafts in (80, 176, 192):
        assert prices[drafts] == pytest.approx(0.96 * CLIFF(ROWS + drafts), rel=0.02), drafts


def test_the_best_budget_before_a_cliff_is_found_at_once_and_kept() -> None:
    """All 448 drafts would be worth it at the slope of the graphs; at the first guess, too. Only 192 fit the largest."""
    assert best(engine(line, line)) > 300, "without the cliff: the test would show nothing"
    assert best(CLIFF) == 192
    budgets = run(ahead_costs(builds=False, graphs=GRAPHS), CLIFF, 200)
    assert max(budgets) <= 192
    assert budgets[-100:].count(192) >= 95
    lost = sum(CLIFF(ROWS + 192) / CLIFF(ROWS + budget) * TOKENS[budget] / TOKENS[192] for budget in budgets[2:])
    assert lost >= 0.98 * 198, "in tokens a second, of the best from the first step on; two come before prices"


def test_steps_behind_a_cliff_are_tried_rarely() -> None:
    """Every try loses some ten steps, and may do so once in 1,000: 1 % of the time. The first comes sooner, since how dear it is
    was a guess, and takes a step more. They do not end.
    """
    budgets = np.array(run(ahead_costs(builds=False, graphs=GRAPHS), CLIFF, 6000))
    beyond = np.flatnonzero(budgets > 192)
    tries = np.split(beyond, np.flatnonzero(np.diff(beyond) > 1) + 1)
    assert 3 <= len(tries) <= 8
    assert all(len(each) <= 3 for each in tries), "no more than are under way when the first has ended"
    lost = sum(CLIFF(ROWS + int(budget)) - CLIFF(ROWS + 192) for budget in budgets[beyond])
    assert lost <= 0.0125 * sum(CLIFF(ROWS + int(budget)) for budget in budgets)


def test_where_steps_without_a_graph_are_not_dear_they_are_used() -> None:
    flat = engine(line, lambda tokens: 0.0105 + 2e-5 * tokens)
    wanted = best(flat)
    assert wanted > 300
    budgets = run(ahead_costs(builds=False, graphs=GRAPHS), flat, 1000)
    assert max(budgets[:300]) <= 192
    rates = TOKENS / np.array([flat(ROWS + int(drafts)) for drafts in DRAFTS])
    assert rates[budgets[500:]].min() > 0.98 * rates[wanted], "from the first try on"


def test_a_machine_whose_cliff_has_gone_is_found_out() -> None:
    costs = ahead_costs(builds=False, graphs=GRAPHS)
    assert max(run(costs, CLIFF, 3000)[-100:]) <= 192
    assert min(run(costs, engine(line, line), 2500)[-100:]) > 192
    assert max(run(costs, CLIFF, 100)[12:]) <= 192, "and one that comes, when prices are looked at next"


def test_a_larger_graph_that_is_cheaper_is_found() -> None:
    """That of 208 tokens takes 10 % less than its neighbours make it, so it is the best: by the line it is 5 % below another."""

    def jag(tokens: int) -> float:
        return (0.010 + 1.4e-4 * tokens) * (0.90 if tokens == 208 else 1.0)

    seconds = engine(jag, eager)
    assert best(seconds) == 208 - ROWS
    assert best(engine(lambda tokens: 0.010 + 1.4e-4 * tokens, eager)) != 208 - ROWS
    budgets = run(ahead_costs(builds=False, graphs=GRAPHS), seconds, 150)
    assert budgets[-50:].count(208 - ROWS) >= 45


def test_the_first_step_of_a_graph_is_believed_only_if_it_was_not_slow() -> None:
    """It may have been captured in it, which takes many times as long; cheaper than expected is no accident."""
    costs = ahead_costs(builds=False, graphs=GRAPHS)
    costs.observe(ROWS, 0, 0.010)
    before = costs.extra(ROWS, 192)
    costs.observe(ROWS, 64, 0.200)
    after = costs.extra(ROWS, 192)
    assert after[64] == pytest.approx(before[64] + 0.04 * (0.010 + before[64] + 0.04 * 0.010), rel=0.05), "no more hope"
    assert after[[32, 192]] == pytest.approx(before[[32, 192]])
    costs.observe(ROWS, 192, 0.0101)
    assert costs.extra(ROWS, 192)[192] == pytest.approx(0.0001)


def test_a_graph_that_was_held_up_once_is_no_dearer_than_its_neighbours_make_it() -> None:
    costs = ahead_costs(builds=False, graphs=GRAPHS)
    for drafts in (0, *4 * [32], *4 * [96]):
        costs.observe(ROWS, drafts, line(ROWS + drafts))
    for _ in range(3):
        costs.observe(ROWS, 64, 0.030)
    assert costs.drafting(ROWS, 96)[64] == pytest.approx(line(ROWS + 64)), "the first of its size, and two"
    costs.observe(ROWS, 64, 0.030)
    assert costs.drafting(ROWS, 96)[64] == pytest.approx(0.030), "three are believed"
    for _ in range(97):
        costs.observe(ROWS, 32, line(ROWS + 32))
    assert costs.drafting(ROWS, 96)[64] <= line(ROWS + 64), "but not for ever"
    costs.observe(ROWS, 64, 0.9 * line(ROWS + 64))
    assert costs.drafting(ROWS, 96)[64] == pytest.approx(0.9 * line(ROWS + 64)), "then what was measured is forgotten"


def test_none_is_no_dearer_than_some_drafts_were() -> None:
    """The only plain step was held up. Were it believed, hopeless drafts would be verified for ever."""
    costs = ahead_costs(builds=False, graphs=GRAPHS)
    costs.observe(ROWS, 0, 0.020)
    for _ in range(3):
        costs.observe(ROWS, 64, line(ROWS + 64))
    assert costs.drafting(ROWS, 192)[0] == pytest.approx(line(ROWS + 64))
    run(costs, CLIFF, 20, ROWS + np.minimum(1.0, 0.01 * DRAFTS))
    assert costs.alone(ROWS) == pytest.approx(line(ROWS))


@pytest.mark.parametrize("times", [3, 40])
def test_prices_move_with_what_is_known_of_plain_steps(times: int) -> None:
    """The first plain steps took many times as long, which made drafts look as if they saved time. The next plain one puts all
    graphs right at once.
    """
    costs = ahead_costs(builds=False, graphs=GRAPHS)
    costs.observe(ROWS, 0, times * line(ROWS))
    for drafts in (64, 192, 300):
        for _ in range(31):
            costs.observe(ROWS, drafts, CLIFF(ROWS + drafts))
    costs.observe(ROWS, 0, line(ROWS))
    prices = costs.drafting(ROWS, DRAFTS[-1])
    for drafts in (0, 64, 192):
        assert prices[drafts] == pytest.approx(CLIFF(ROWS + drafts)), drafts
    assert prices[300] > 2 * prices[192]
    assert run(costs, CLIFF, 40)[-1] == 192


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from([(), (1,), (8,), (1, 2, 4), (8, 64), tuple(GRAPHS)]),
    st.sampled_from([1, 7]),
)
def test_no_step_is_free_whatever_was_measured(seed: int, graphs: tuple[int, ...], width: int) -> None:
    """A price of nothing, or less, would win against every other. Steps that cost by their tokens, or not, some held up."""
    rng = np.random.default_rng(seed)
    costs = StepCosts(rng.choice([0.25, 1.0]), builds=False, graphs=graphs)
    for _ in range(80):
        rows = int(rng.choice([1, 47, 52, 70]))
        drafts = int(rng.integers(0, rows * width + 1))
        per_token = rng.choice([0.0, 1e-3, 1e-2])
        costs.observe(rows, drafts, (1.0 + (rows + drafts) * per_token) * (30.0 if rng.random() < 0.05 else 1.0))
        if costs.known:
            assert costs.drafting(rows, rows * width).min() > 0.0


def test_the_first_step_behind_the_largest_graph_is_not_believed() -> None:
    """It builds kernels. Until another ran, such steps are taken to be three times as dear as the largest graph's."""
    costs = ahead_costs(builds=False, graphs=GRAPHS)
    for drafts in (0, *4 * [192], 200):
        costs.observe(ROWS, drafts, 5.0 if drafts == 200 else line(ROWS + drafts))
    assert costs.drafting(ROWS, 200)[200] == pytest.approx(3.0 * line(ROWS + 192), rel=0.02)
    costs.observe(ROWS, 200, 0.030)
    assert costs.drafting(ROWS, 200)[200] == pytest.approx(0.030)


def test_a_size_behind_the_largest_graph_is_not_taken_for_a_graph() -> None:
    """40 tokens are nearest to the tenth size of the grid, and the tenth graph ran: it is another kind of step."""
    costs = StepCosts(0.25, builds=False, graphs=range(1, 33))
    for drafts in (0, *4 * [10]):
        costs.observe(1, drafts, 0.010)
    before = costs.extra(1, 39)[39]
    assert not costs.observe(1, 39, 5.0)
    assert costs.extra(1, 39)[39] == pytest.approx(before)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.floats(2e-6, 2e-4), st.floats(0.5, 0.95))
def test_the_best_graph_is_found_among_jags_and_noise(seed: int, slope: float, keeps: float) -> None:
    """Graphs differ by up to 5 % from a line whose slope is 0.05 to 5 times the first guess; steps by 3 %, and one in ten takes
    1.4 times as long. The mean rate of steps 100 to 300 is within 10 % of the best (in 1,000 draws of all this within 0.3 % on
    average, and at worst 6.7 % below).
    """
    rng = np.random.default_rng(seed)
    jags = dict(zip(GRAPHS, rng.uniform(0.95, 1.05, len(GRAPHS)), strict=True))
    true = engine(lambda tokens: (0.010 + slope * tokens) * jags[tokens], lambda _: 1.0)
    tokens = ROWS + np.append(0.0, np.cumsum(np.repeat(keeps ** np.arange(1, WIDTH + 1), ROWS)))

    def noisy(size: int) -> float:
        return true(size) * rng.uniform(0.97, 1.03) * (1.4 if rng.random() < 0.1 else 1.0)

    rates = tokens / np.array([true(ROWS + int(drafts)) for drafts in DRAFTS])
    budgets = run(ahead_costs(builds=False, graphs=GRAPHS), noisy, 300, tokens)
    assert rates[budgets[100:]].mean() > 0.90 * rates.max()


@pytest.mark.parametrize("graphs", [(), GRAPHS])
def test_a_first_guess_that_is_too_dear_is_found_out(graphs: list[int]) -> None:
    """At twice a row's cost no draft looks worth it. Where no kernels are built for a try, one is made in the end."""
    seconds = engine(line, eager) if graphs else line
    assert max(run(StepCosts(2.0, builds=False, graphs=graphs), seconds, 120)) == 0
    assert run(StepCosts(2.0, builds=False, graphs=graphs), seconds, 700)[-1] >= 0.9 * min(best(seconds), 192)
    assert max(run(StepCosts(2.0, builds=True, graphs=graphs), seconds, 700)) == 0


def test_small_graphs_that_are_steep_do_not_make_all_larger_ones_dear_for_ever() -> None:
    """Up to 112 tokens a draft costs four times a row's part, and then nothing. After 256 steps without drafts, what was
    measured is doubted.
    """
    seconds = engine(lambda tokens: 0.010 + 3e-4 * (min(tokens, 112) - ROWS), eager)
    assert best(seconds) == 192
    costs = StepCosts(2.0, builds=False, graphs=GRAPHS)
    for drafts in (0, *4 * [16], *4 * [32], *4 * [48]):
        costs.observe(ROWS, drafts, seconds(ROWS + drafts))
    assert max(run(costs, seconds, 200)) == 0, "the test would show nothing"
    assert run(costs, seconds, 800)[-1] == 192


def test_the_guess_is_what_it_was_once_drafts_are_verified_again() -> None:
    costs = StepCosts(0.25, builds=False)
    costs.observe(ROWS, 0, 0.010)
    guess = costs.extra(ROWS, 64)
    for _ in range(256):
        costs.observe(ROWS, 0, 0.010)
    assert costs.extra(ROWS, 64)[64] == pytest.approx(guess[64] / 4)
    costs.observe(ROWS, 64, 0.010)  # the first of its size: says nothing
    assert costs.extra(ROWS, 64)[64] == pytest.approx(guess[64])


def test_more_rows_than_the_largest_graph_holds_are_priced_without_any() -> None:
    with_graphs, without = StepCosts(0.25, builds=False, graphs=[8, 16]), StepCosts(0.25, builds=False)
    for costs in (with_graphs, without):
        for drafts in (0, 0, 10, 10, 40, 40):
            costs.observe(20, drafts, 0.010 + 1e-4 * drafts)
    assert with_graphs.drafting(20, 100) == pytest.approx(without.drafting(20, 100))


@pytest.mark.parametrize("sizes", [[0, 8], [8, 8], [16, 8], [[8]]])
def test_graphs_that_do_not_increase_are_refused(sizes: list[int]) -> None:
    with pytest.raises(CostCurveError, match="increasing"):
        GraphSizes(sizes)


@pytest.mark.parametrize(
    ("rows", "load"),
    [(128, {}), (128, {"between": 1.0, "within": 0.5}), (256, {"within": 2.0}), (256, {"kinds": (2.0, -2.0)})],
)
def test_learned_prices_lose_little_to_known_ones(rows: int, load: dict[str, Any]) -> None:
    """On the digitised curves of V4-Flash, whose cliff is at 1,024 tokens; of 200 steps the first ones are part. Without graphs
    the same prices reached 0.93, 0.92, 0.46 and 0.83.
    """
    verify, draft = v4_flash_verify(), v4_flash_draft()
    workload = Workload(rows, **load)

    def rate(policy: Simulated) -> float:
        return tokens_per_second(policy, workload, verify, WIDTH, 200)

    known = rate(planned(verify, draft, rows, WIDTH))
    assert rate(learned(verify, draft, rows, WIDTH)) > 0.97 * known
