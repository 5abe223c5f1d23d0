"""What a run learns: costs of steps, the worth of a token, and credit for side work."""

from __future__ import annotations

import numpy as np
import pytest
from deepinfer_specdec.errors import SpecDecodeError
from deepinfer_specdec.scheduling.budget import expected_tokens
from deepinfer_specdec.scheduling.choice import choose, round_sizes
from deepinfer_specdec.scheduling.costs import StepCosts
from deepinfer_specdec.scheduling.credit import WorkCredit
from deepinfer_specdec.scheduling.hopes import Hopes
from deepinfer_specdec.scheduling.surcharge import GRID, Surcharge
from deepinfer_specdec.scheduling.worth import scaled_tokens, token_worth, worthless_below
from hypothesis import given, settings
from hypothesis import strategies as st


def test_step_costs_learn_a_line() -> None:
    costs = StepCosts()
    assert costs.needs_plain(4)
    for _ in range(3):
        costs.observe(4, 0, 0.010)
    assert not costs.needs_plain(4)
    assert costs.needs_plain(16)
    guess = costs.extra(4, 16)
    assert (np.diff(guess) > 0).all()
    for _ in range(5):
        costs.observe(4, 8, 0.012)
    learned = costs.extra(4, 16)
    assert learned[8] == pytest.approx(0.002)
    assert learned[16] == pytest.approx(guess[16] * learned[8] / guess[8])
    for _ in range(70):
        costs.observe(4, 8, 0.012)
    assert costs.needs_plain(4)


def test_a_plain_step_that_was_held_up_is_not_believed_against_another() -> None:
    costs = StepCosts()
    costs.observe_ahead(8, 0.030)
    costs.observe_ahead(8, 0.020)
    assert costs.ahead(8) == 0.020


def test_plain_steps_are_wanted_for_steps_of_their_own_size() -> None:
    """A batch that fills and drains passes the sizes between often; each is not asked for anew every time."""
    costs = StepCosts()
    for rows in (16, 16, 4, 4):
        costs.observe(rows, 0, 0.001 * rows)
    for _ in range(31):
        costs.observe(16, 8, 0.020)
    assert not costs.needs_plain(16)
    assert not costs.needs_plain(4)
    for _ in range(2):
        costs.observe(15, 8, 0.020)
    assert costs.needs_plain(16)
    assert not costs.needs_plain(4)
    costs.observe(14, 0, 0.014)
    assert not costs.needs_plain(16)
    for _ in range(600):
        costs.observe(16, 8, 0.020)
    assert costs.needs_plain(4)  # the machine may have changed since


def test_a_gain_that_leaves_no_doubt_is_measured_less() -> None:
    costs = StepCosts()
    assert costs.needs_plain(6, gain=3.0), "not before anything is known"
    costs.observe(4, 0, 0.010)
    costs.observe(4, 0, 0.010)
    assert costs.needs_plain(6, gain=1.1)
    assert not costs.needs_plain(6, gain=1.5), "four rows say enough about six"
    assert costs.needs_plain(9, gain=3.0), "but not about nine"
    costs.observe(8, 0, 0.012)
    assert not costs.needs_plain(6, gain=1.1), "between four and eight"
    costs = StepCosts()
    costs.observe(4, 0, 0.010)
    costs.observe(4, 0, 0.010)
    for _ in range(100):
        costs.observe(4, 8, 0.012)
    assert costs.needs_plain(4, gain=1.1)
    assert not costs.needs_plain(4, gain=1.5)
    for _ in range(40):
        costs.observe(4, 8, 0.012)
    assert costs.needs_plain(4, gain=1.5), "it ends some time"


def test_step_costs_keep_kinks() -> None:
    """9 drafts fill a tile that 8 begin, so they are cheaper: a smooth curve would hide where to aim."""
    costs = StepCosts()
    true = {6: 0.003, 8: 0.006, 9: 0.004, 11: 0.005}
    for _ in range(15):
        costs.observe(16, 0, 0.020)
        for drafts, seconds in true.items():
            costs.observe(16, drafts, 0.020 + seconds)
    extra = costs.extra(16, 16)
    assert extra[8] > 1.2 * extra[9]
    for drafts, seconds in true.items():
        assert extra[drafts] == pytest.approx(seconds, rel=0.15), drafts


def test_what_the_first_steps_with_drafts_took_counts_at_once() -> None:
    """However long plain steps were measured before: three that cost more than guessed change what the next one is priced at."""
    costs = StepCosts()
    for _ in range(500):
        costs.observe(64, 0, 0.040)
    assert costs.synchronous(64, 512)[48] < 0.067
    for _ in range(4):
        costs.observe(64, 48, 0.070)
    assert costs.synchronous(64, 512)[48] - costs.host_seconds(64) == pytest.approx(0.070)


def test_one_step_that_was_held_up_does_not_end_all_tries() -> None:
    """A step with drafts took three times as long: it is not believed until others agree."""
    costs = StepCosts()
    for _ in range(3):
        costs.observe(16, 0, 0.020)
    guess = costs.extra(16, 64)
    for _ in range(2):
        costs.observe(16, 21, 0.060)
    assert costs.extra(16, 64)[21] <= 1.01 * guess[21]
    for _ in range(2):
        costs.observe(16, 21, 0.060)
    assert costs.extra(16, 64)[21] == pytest.approx(0.040, rel=0.1)
    for _ in range(300):
        costs.observe(16, 0, 0.020)
    assert costs.extra(16, 64)[21] <= 1.01 * guess[21], "nor do three, for ever: what looks dear is measured no more"


def test_the_first_step_of_a_size_says_nothing() -> None:
    """Kernels are built in it. The size counts, not how it is shared between rows and drafts, and plain steps count too."""
    costs = StepCosts()
    for _ in range(3):
        costs.observe(16, 0, 0.020)
    costs.observe_ahead(24, 0.021)
    guess = costs.extra(16, 64)
    assert not costs.observe(16, 48, 0.200)
    assert costs.extra(16, 64) == pytest.approx(guess)
    assert costs.observe(16, 48, 0.038)
    assert costs.extra(16, 64)[48] == pytest.approx(0.018, rel=0.02)
    assert costs.observe(16, 8, 0.023), "24 tokens ran without drafts"
    assert costs.observe(12, 52, 0.038), "64 tokens ran already"


@pytest.mark.parametrize("builds", [False, True])
def test_prices_go_on_as_far_as_a_thousand_rows_have_drafts(builds: bool) -> None:
    """Were they flat behind some number, all 7,000 drafts would look worth it, and then 6,999."""
    costs = StepCosts(builds=builds)
    for drafts in (0, *4 * [1000]):
        costs.observe(1000, drafts, 0.040 + 2e-5 * drafts)
    assert costs.extra(1000, 7000)[[1000, 4096, 7000]] == pytest.approx([0.02, 0.08192, 0.14], rel=0.01)


def test_without_builds_a_size_near_one_that_ran_says_what_it_costs() -> None:
    """A loop whose sizes differ from step to step would never learn if each had to come twice."""
    costs = StepCosts(0.25, builds=False)
    costs.observe(16, 0, 0.010)
    assert costs.extra(16, 8)[8] == pytest.approx(0.25 * StepCosts.extra(_after_one(16), 16, 8)[8])
    assert not costs.observe(16, 100, 0.012), "the first of its range"
    assert costs.observe(16, 103, 0.012)
    assert costs.extra(16, 112)[103] == pytest.approx(0.002)
    exact = _after_one(16)
    assert not exact.observe(16, 100, 0.012)
    assert not exact.observe(16, 103, 0.012)


def _after_one(rows: int) -> StepCosts:
    costs = StepCosts()
    costs.observe(rows, 0, 0.010)
    return costs


def test_a_cliff_does_not_make_all_before_it_dear() -> None:
    """Beyond 1,000 drafts a step leaves its graph and takes eight times as long. What comes before is found all the same."""

    def seconds(drafts: int) -> float:
        return 0.017 + 1e-5 * drafts if drafts <= 1000 else 0.110

    def best_after(costs: StepCosts) -> int:
        tokens = 256 + 0.7 * np.arange(1793)
        costs.observe(256, 0, seconds(0))
        for step in range(60):
            budget = 1792 if step < 4 else int((tokens / (costs.alone(256) + costs.extra(256, 1792))).argmax())
            costs.observe(256, budget, seconds(budget))
        return budget

    assert 700 <= best_after(StepCosts(0.25, builds=False)) <= 1000
    assert best_after(StepCosts()) == 0, "without hope it is not: the test would show nothing"


def test_what_is_not_known_well_is_never_dearer_than_its_neighbours_make_it() -> None:
    surcharge, guess = Surcharge(), GRID * np.float64(0.0005)
    for _ in range(3):
        surcharge.add(32, 0.012)
    assert surcharge.line(guess, 128)[64] == pytest.approx(0.024), "at the level of what is known"
    for _ in range(2):
        surcharge.add(64, 0.060)
        assert surcharge.line(guess, 128)[64] == pytest.approx(0.024), "two dear steps may have been held up"
    surcharge.add(64, 0.060)
    assert surcharge.line(guess, 128)[64] == pytest.approx(0.060, rel=0.02), "three are believed"
    for _ in range(97):
        surcharge.add(32, 0.012)
    assert surcharge.line(guess, 128)[64] == pytest.approx(0.024), "but not for ever"
    surcharge.add(64, 0.020)
    assert surcharge.line(guess, 128)[64] == pytest.approx(0.020), "then what was measured long ago is forgotten"


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.2, 1.2), st.floats(0.0, 2.0))
def test_the_best_size_is_found_and_kept(seed: int, slope: float, jump: float) -> None:
    """Sixteen rows whose drafts all have the same chances; a step costs 10 ms, 0.3 to 1.5 times the guess a draft, a jump
    beyond 32 tokens, and 10 ms more when its size is new; one step in ten takes 1.4 times as long, the others up to 4 % more or
    less. After 80 steps the expected rate of those chosen is within 15 % of the best there is (in 1,500 draws of all this it was
    within 0.5 % on average, and at worst 13 % below).
    """
    rng = np.random.default_rng(seed)
    rows, width, keeps = 16, 8, rng.uniform(0.5, 0.9)
    survivals = np.tile(keeps ** np.arange(1, width + 1), (rows, 1))
    counts = np.full(rows, width)
    drafts = np.arange(rows * width + 1)
    true = 0.010 + 0.00045 * slope * drafts + 0.001 * jump * (rows + drafts > 32)
    gained = np.append(0.0, np.cumsum(np.sort(survivals, axis=None)[::-1]))
    rate = (rows + gained) / true
    best = rate[(drafts == 0) | round_sizes(rows + drafts)].max()
    costs, seen, got = StepCosts(), set(), []
    for step in range(160):
        budget = 0
        if step >= 3:
            budget = choose(survivals, counts, costs.synchronous(rows, rows * width), sizes=round_sizes).budget
        noise = rng.uniform(0.96, 1.04) * (1.4 if rng.random() < 0.1 else 1.0)
        costs.observe(rows, budget, true[budget] * noise + 0.010 * (budget not in seen))
        seen.add(budget)
        got.append(rate[budget])
    assert np.mean(got[80:]) > 0.85 * best


def test_one_bad_start_does_not_end_all_hopes() -> None:
    hopes = Hopes()
    drafts, worth, every = np.full((4, 1), 0.8), np.ones(4), np.ones(4, int)
    assert hopes.believed(drafts) == pytest.approx(drafts)
    for _ in range(20):
        hopes.settle(drafts, worth, every, 0 * every)
    assert hopes.believed(drafts).max() < 0.1
    for _ in range(800):
        hopes.rest()
    assert hopes.believed(drafts).min() > 0.75
    for _ in range(1000):
        hopes.settle(drafts, worth, every, every)
    assert hopes.believed(drafts).max() == pytest.approx(0.96), "there are no more than so many hopes too few"


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000))
def test_hopes_become_what_is_kept_in_every_range_of_survivals_and_never_grow_along_a_row(seed: int) -> None:
    """Drafts are kept as often as they say, times 0.4 below 0.15 and times 0.8 above; those of 3,000 steps say so."""
    rng = np.random.default_rng(seed)
    hopes, factors = Hopes(), lambda survivals: np.where(survivals < 0.15, 0.4, 0.8)
    for _ in range(3000):
        survivals = rng.uniform(0.0, 1.0, (3, 1))
        kept = (rng.random(3) < survivals[:, 0] * factors(survivals[:, 0])).astype(int)
        hopes.settle(survivals, rng.uniform(0.5, 2.0, 3), np.ones(3, int), kept)
    rows = -np.sort(-rng.uniform(0.0, 1.0, (20, 8)), axis=1)
    believed = hopes.believed(rows)
    assert (np.diff(believed, axis=1) <= 0.0).all()
    # A fading memory of some 100 steps holds about 40 drafts of the lowest range, 3 of which are kept: give or take half.
    assert believed[:, 0] == pytest.approx(rows[:, 0] * factors(rows[:, 0]), rel=0.45)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.001, 0.02), st.floats(1e-5, 1e-3))
def test_plain_steps_are_priced_between_what_was_measured(seed: int, fixed: float, per_row: float) -> None:
    """A true line with 10 % noise and outliers: medians over half an octave are within 15 %, also where nothing was run."""
    rng = np.random.default_rng(seed)
    costs = StepCosts()
    for place, rows in enumerate(np.repeat([1, 2, 3, 5, 8, 13, 21, 34, 64], 15)):
        noise = rng.uniform(0.95, 1.05) if place % 9 else 3.0
        costs.observe_ahead(int(rows), (fixed + per_row * rows) * noise)
    for rows in (1, 4, 7, 16, 40, 64):
        assert costs.ahead(rows) == pytest.approx(fixed + per_row * rows, rel=0.15)
    share = fixed / (fixed + per_row * 64)
    assert costs.fixed_share(64) == pytest.approx(share, abs=0.3)
    assert costs.fixed_share(1) == 1.0


def test_the_loop_that_runs_ahead_is_never_slower_than_the_synchronous_one() -> None:
    costs = StepCosts()
    for _ in range(5):
        costs.observe_ahead(8, 0.020)
    assert costs.ahead(8) == pytest.approx(0.020)
    for _ in range(5):
        costs.observe(8, 0, 0.012)
        costs.observe_host(8, 0.001, 0.012)
    assert costs.ahead(8) == pytest.approx(0.013)
    assert costs.synchronous(8, 4)[0] == pytest.approx(0.013)
    assert costs.least(8) == pytest.approx(0.012 + 0.001 * 16 / 24), (
        "to be beaten with a third of the host's time hidden"
    )
    for _ in range(5):
        costs.observe_ahead(64, 0.040)
    assert costs.alone(64) == pytest.approx(0.040), "not eight times what 8 rows take"


def test_pauses_of_the_caller_are_not_the_loops_time() -> None:
    costs = StepCosts()
    costs.observe(4, 0, 0.010)
    assumed = costs.host_seconds(4)
    assert 0.0 < assumed < 0.001
    costs.observe_host(4, 3.0, 0.010)
    assert costs.host_seconds(4) == assumed
    for _ in range(3):
        costs.observe_host(4, 0.0004, 0.010)
    assert costs.host_seconds(4) == pytest.approx(0.0004)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0.0, 2000.0), min_size=1, max_size=64), st.floats(0.0, 1.0))
def test_worth_averages_one_and_favours_the_last(finish: list[float], share: float) -> None:
    worth = token_worth(np.array(finish), share)
    assert worth.mean() == pytest.approx(1.0)
    assert (worth >= 1.0 - share - 1e-9).all()
    order = np.argsort(finish, kind="stable")
    assert (np.diff(worth[order]) >= -1e-9).all()
    assert token_worth(np.full(7, finish[0]), share) == pytest.approx(np.ones(7))


def test_a_row_far_ahead_of_the_others_is_worth_its_own_part_of_a_step() -> None:
    worth = token_worth(np.array([10.0, 400.0, 400.0, 400.0]), 0.8)
    assert worth[0] == pytest.approx(0.2, abs=0.01)
    assert worth[1:] == pytest.approx(np.full(3, (4 - 0.2) / 3), abs=0.01)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 32))
def test_the_best_budget_never_rests_on_drafts_below_the_floor(seed: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    width = 6
    seconds = 0.01 + np.concatenate([[0.0], np.cumsum(rng.uniform(0.0, 0.002, rows * width))])
    survivals = np.cumprod(rng.uniform(0.0, 1.0, (rows, width)), axis=1)
    floor = worthless_below(rows, seconds)
    tokens = expected_tokens(survivals)
    budget = int(((rows + tokens) / seconds[: tokens.size]).argmax())
    ranked = np.sort(survivals.ravel())[::-1]
    assert budget == 0 or ranked[:budget].mean() >= 2.0 * floor - 1e-12


def test_tokens_of_a_sample_stand_for_the_whole() -> None:
    survivals = np.array([[0.9, 0.5], [0.7, 0.1]])
    whole = np.repeat(survivals, 4, axis=0)
    scaled = scaled_tokens(expected_tokens(survivals), 2, 8)
    assert scaled[-1] == pytest.approx(expected_tokens(whole)[-1])
    assert scaled == pytest.approx(expected_tokens(whole), abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 0.1), st.floats(0.0, 0.05)), max_size=60), st.floats(0.001, 0.5))
def test_credit_bounds_side_work(turns: list[tuple[float, float]], share: float) -> None:
    """Whatever is asked for: the share of the time, what was saved up, and the last piece's overrun."""
    credit = WorkCredit(share, 0.01, 0.02)
    passed = worked = longest = 0.0
    for wait, work in turns:
        credit.earn(wait)
        passed += wait
        if credit.ready:
            credit.spend(work)
            worked += work
            longest = max(longest, work)
    assert worked <= share * passed + 0.01 + longest + 1e-9
    with pytest.raises(SpecDecodeError, match="between 0 and 1"):
        WorkCredit(1.0, 0.0, 0.0)


def test_no_survival_is_believed_above_certainty() -> None:
    hopes = Hopes()
    for _ in range(500):
        hopes.settle(np.array([[0.7]]), np.ones(1), np.array([1]), np.array([1]))
    assert hopes.believed(np.array([[0.95, 0.9]])).max() <= 1.0
    assert hopes.believed(np.array([[0.7]]))[0, 0] > 0.7
