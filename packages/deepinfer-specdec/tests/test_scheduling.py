"""Cost curves, admission, budgets, bounds of the simulator and calibration."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from deepinfer_specdec import (
    CostCurve,
    CostOptions,
    Draft,
    OnlineCalibration,
    TemperatureScaling,
    admit,
    fit_sts,
)
from deepinfer_specdec.errors import CalibrationError, CostCurveError
from deepinfer_specdec.scheduling.budget import StepLoad, early_stop_budget, live_budget
from deepinfer_specdec.scheduling.calibration import cumulative_errors, sigmoid
from deepinfer_specdec.scheduling.choice import choose, round_sizes
from deepinfer_specdec.simulation.throughput import (
    Workload,
    clairvoyant,
    fixed_length,
    foreseeing,
    live_lookahead,
    paper_production,
    planned,
    tokens_per_second,
    v4_flash_draft,
    v4_flash_verify,
)
from hypothesis import given, settings
from hypothesis import strategies as st

# --- cost curves ---------------------------------------------------------------------------------------------


def test_curve_pads_to_graphs_interpolates_above_and_keeps_jags() -> None:
    curve = CostCurve([4, 8, 16, 32], [2.0, 1.5, 3.0, 5.0], padded_to=8)
    assert curve.seconds(np.array([0, 1, 4, 5, 8, 12, 32])).tolist() == [0.0, 2.0, 2.0, 1.5, 1.5, 2.25, 5.0]
    assert curve.seconds(48) == pytest.approx(5.0 + 16 * 2.0 / 16)  # goes on with the last slope


def test_curve_refreshes_by_medians_that_an_outlier_cannot_move() -> None:
    curve = CostCurve([1, 8], [1.0, 2.0], options=CostOptions(refresh_every=5))
    for seconds in (3.0, 3.0, 90.0, 3.0, 3.0):
        curve.observe(8, seconds)
    curve.observe(8, -1.0)
    assert curve.seconds(8) == 3.0
    assert curve.seconds(1) == 1.0


@pytest.mark.parametrize(
    ("sizes", "seconds", "padded"), [([], [], 0), ([2, 1], [1, 1], 0), ([1], [0.0], 0), ([1, 2], [1, 1], 3)]
)
def test_bad_curves_are_refused(sizes: list, seconds: list, padded: int) -> None:
    with pytest.raises(CostCurveError, match="allowed"):
        CostCurve(sizes, seconds, padded)


# --- admission and budgets -----------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 40))
def test_admission_equals_a_sorted_list(seed: int, budget: int) -> None:
    """Coarse values make ties; the list sorts by (-survival, column, row), which no token's value enters."""
    rng = np.random.default_rng(seed)
    rows, width = int(rng.integers(1, 6)), int(rng.integers(1, 6))
    counts = rng.integers(0, width + 1, rows).astype(np.int32)
    conf = rng.choice([0.5, 1.0], (rows, width)).astype(np.float32)
    survivals = Draft(np.zeros((rows, width), np.int32), counts, conf).survivals()
    listed = sorted((-survivals[r, k], k, r) for r in range(rows) for k in range(counts[r]))
    expected = np.zeros(rows, int)
    for _, _, row in listed[:budget]:
        expected[row] += 1
    assert admit(survivals, counts, budget).tolist() == expected.tolist()


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10_000))
def test_budgets_against_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, width = int(rng.integers(1, 5)), int(rng.integers(1, 5))
    survivals = np.cumprod(rng.uniform(0.3, 1.0, (rows, width)), axis=1)
    curve = CostCurve(range(1, 30), rng.uniform(0.5, 1.5, 29) * (1.0 + 0.1 * np.arange(29)))
    ranked = sorted(survivals.ravel(), reverse=True)
    rate = [(rows + sum(ranked[:b])) / float(curve.seconds(rows + b)) for b in range(len(ranked) + 1)]
    assert rate[live_budget(survivals, StepLoad(rows), curve)] == pytest.approx(max(rate))
    stop = next((b for b in range(len(ranked)) if rate[b + 1] <= rate[b]), len(ranked))
    assert early_stop_budget(survivals, StepLoad(rows), curve) == stop


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10_000))
def test_one_sort_chooses_as_two_rules_do(seed: int) -> None:
    """Jagged times, ragged rows, coarse values with ties: the best rate of all budgets, spent as a sorted list would."""
    rng = np.random.default_rng(seed)
    rows, width = int(rng.integers(1, 6)), int(rng.integers(1, 5))
    counts = rng.integers(0, width + 1, rows)
    inside = np.arange(width) < counts[:, None]
    values = np.where(inside, np.cumprod(rng.choice([0.0, 0.5, 0.75, 1.0], (rows, width)), axis=1), 0.0)
    seconds = rng.uniform(0.5, 1.5, rows * width + 1) * (1.0 + 0.2 * np.arange(rows * width + 1))
    listed = sorted((-values[r, k], k, r) for r in range(rows) for k in range(counts[r]))
    rates = [(rows - sum(value for value, _, _ in listed[:b])) / seconds[b] for b in range(len(listed) + 1)]
    edge = float(rng.choice([0.0, 0.3]))
    choice = choose(values, counts, seconds, edge)
    assert choice.lengths.sum() == choice.budget
    if max(rates) > rates[0] * (1.0 + edge):
        assert rates[choice.budget] == pytest.approx(max(rates))
        assert choice.gain == pytest.approx(max(rates) / rates[0])
        expected = np.zeros(rows, int)
        for _, _, row in listed[: choice.budget]:
            expected[row] += 1
        assert choice.lengths.tolist() == expected.tolist()
    else:
        assert (choice.budget, choice.gain) == (0, 1.0)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 40))
def test_only_round_sizes_are_chosen_where_that_is_asked_for(seed: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 5, rows)
    values = np.where(np.arange(4) < counts[:, None], np.cumprod(rng.uniform(0.5, 1.0, (rows, 4)), axis=1), 0.0)
    seconds = 1.0 + 0.02 * np.arange(4 * rows + 1)
    ranked = np.sort(values.ravel())[::-1]
    allowed = [
        b
        for b in range(int(counts.sum()) + 1)
        if b == 0
        or any(rows + b <= most and (rows + b) % step == 0 for most, step in ((8, 1), (16, 4), (64, 8), (999, 16)))
    ]
    rates = {b: (rows + ranked[:b].sum()) / seconds[b] for b in allowed}
    choice = choose(values, counts, seconds, sizes=round_sizes)
    assert choice.budget in allowed
    assert rates[choice.budget] == pytest.approx(max(rates.values()))
    assert choice.lengths.sum() == choice.budget


def test_limits_and_prefill_tokens_count() -> None:
    survivals = np.full((2, 3), 0.99)
    cheap = CostCurve([1, 100], [1.0, 1.01])
    assert live_budget(survivals, StepLoad(2, limit=4), cheap) == 4
    cliff = CostCurve([1, 16, 17, 32], [1.0, 1.0, 9.0, 9.0])
    assert live_budget(survivals, StepLoad(2, other_tokens=10), cliff) == 4


# --- calibration ---------------------------------------------------------------------------------------------


def test_no_policy_beats_the_clairvoyant_one() -> None:
    """Above all that the simulator runs, at its own rate, and not above what every draft kept would make."""
    verify, draft = v4_flash_verify(), v4_flash_draft()
    load = Workload(4, kinds=(2.0, -2.0), within=0.5)
    policies = [
        *(fixed_length(k, draft) for k in range(8)),
        paper_production(verify, draft),
        live_lookahead(verify, draft),
    ]
    rates = [tokens_per_second(policy, load, verify, steps=300) for policy in [*policies, planned(verify, draft, 4, 7)]]
    bound = max(rates)
    for _ in range(4):
        bound, before = tokens_per_second(clairvoyant(verify, draft, bound), load, verify, steps=300), bound
        assert bound >= before * (1.0 - 1e-9)
    assert bound == pytest.approx(before, rel=1e-6)
    assert max(rates) < bound < 32 / float(verify.seconds(32))


@pytest.mark.parametrize("seed", range(20))
def test_with_foresight_no_choice_of_lengths_makes_more(seed: int) -> None:
    """Every length of each of three rows is tried, with curves that jump, for tokens per second and for tokens less a price."""
    rng = np.random.default_rng(seed)
    verify = CostCurve(range(3, 13), np.sort(rng.uniform(1.0, 3.0, 10)) * rng.uniform(0.8, 1.2, 10))
    draft = CostCurve(range(1, 4), np.sort(rng.uniform(0.1, 0.8, 3)))
    block = Draft(np.zeros((3, 3), np.int32), np.full(3, 3, np.int32), rng.random((3, 3), dtype=np.float32))
    gains = np.pad(np.cumsum(block.survivals().astype(np.float64), axis=1), ((0, 0), (1, 0)))

    def outcome(lengths: Sequence[int]) -> tuple[float, float]:
        drafted = sum(length > 0 for length in lengths)
        seconds = float(verify.seconds(3 + sum(lengths))) + (float(draft.seconds(drafted)) if drafted else 0.0)
        return 3.0 + sum(gains[row, length] for row, length in enumerate(lengths)), seconds

    outcomes = [outcome(lengths) for lengths in product(range(4), repeat=3)]
    rate = 1.5
    for policy, worth in (
        (foreseeing(verify, draft), lambda tokens, seconds: tokens / seconds),
        (clairvoyant(verify, draft, rate), lambda tokens, seconds: tokens - rate * seconds),
    ):
        decision = policy(0, block, np.zeros(3, dtype=bool))
        assert worth(*outcome(decision.lengths.tolist())) == pytest.approx(max(worth(*o) for o in outcomes), rel=1e-9)
        drafted = int(np.count_nonzero(decision.lengths))
        assert decision.draft_seconds == pytest.approx(float(draft.seconds(drafted)) if drafted else 0.0)


def test_requests_that_end_by_tokens_make_room_sooner_when_they_are_fast() -> None:
    """Half of the tokens are chat's and half code's, whatever the policy, so a rate is a weighted harmonic mean: with every
    draft verified, 2 / (1 / code + 1 / chat) of what each makes alone, within what 4,000 steps of one request can tell.
    """
    verify, draft = v4_flash_verify(), v4_flash_draft()

    def rate(*kinds: float) -> float:
        return tokens_per_second(fixed_length(7, draft), Workload(1, kinds=kinds, tokens=50), verify, steps=4000)

    code, chat, mixed = rate(2.0), rate(-2.0), rate(2.0, -2.0)
    assert mixed == pytest.approx(2.0 / (1.0 / code + 1.0 / chat), rel=0.08)
    assert mixed < 0.45 * (code + chat)


def synthetic(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """An over-confident head: true conditional acceptance sigmoid(z), reported logits z * t with another t per column."""
    rng = np.random.default_rng(seed)
    z = rng.normal(0.8, 1.2, (count, 5))
    drawn = rng.random(z.shape) < sigmoid(z)
    return z * np.array([2.0, 1.7, 2.5, 1.4, 3.0]), np.cumprod(drawn, axis=1).sum(axis=1)


def test_sts_brings_the_error_of_an_overconfident_head_under_two_percent() -> None:
    """Fitted on 8,000 blocks, measured on 20,000 others (sampling error of the ECE about 0.7 %)."""
    logits, accepted = synthetic(8_000, 0)
    scaling = fit_sts(logits, accepted)
    held, kept = synthetic(20_000, 1)
    assert cumulative_errors(TemperatureScaling.identity(5), held, kept).max() > 0.05
    assert cumulative_errors(scaling, held, kept).max() <= 0.02
    np.testing.assert_allclose(scaling.temperatures, [2.0, 1.7, 2.5, 1.4, 3.0], rtol=0.25)


def test_sts_is_not_biased_by_trimming_and_learns_online() -> None:
    logits, accepted = synthetic(12_000, 2)
    survival = np.cumprod(sigmoid(logits), axis=1)
    verified = (survival > 0.3).sum(axis=1)
    online = OnlineCalibration(5, capacity=12_000, refit_every=4_000)
    for first in range(0, 12_000, 500):
        part = slice(first, first + 500)
        online.observe(logits[part], np.minimum(accepted, verified)[part], verified[part])
    held, kept = synthetic(20_000, 3)
    assert cumulative_errors(online.scaling, held, kept)[:3].max() <= 0.025


def test_steps_of_many_rows_do_not_fit_over_and_over() -> None:
    fits: list[int] = []

    def fit(logits, _accepted, _verified) -> TemperatureScaling:
        fits.append(len(logits))
        return TemperatureScaling.identity(2)

    many = OnlineCalibration(2, capacity=64, refit_every=20, fit=fit, calls_apart=10)
    few = OnlineCalibration(2, capacity=64, refit_every=20, fit=fit, calls_apart=10)
    block = np.zeros((16, 2), np.float32), np.ones(16, np.int32), np.full(16, 2, np.int32)
    for _ in range(21):
        many.observe(*block)
    assert fits == [32, 64], "at the second call, when 20 blocks are there, and ten calls later"
    fits.clear()
    for _ in range(60):
        few.observe(*(part[:1] for part in block))
    assert fits == [20, 40, 60], "where blocks are few, they alone decide"


def test_calibration_files(tmp_path: Path) -> None:
    TemperatureScaling(np.array([1.5, 0.5])).save(tmp_path / "sts.json")
    assert TemperatureScaling.load(tmp_path / "sts.json").temperatures.tolist() == [1.5, 0.5]
    (tmp_path / "bad.json").write_text('{"temperatures": [0]}')
    with pytest.raises(CalibrationError, match="allowed"):
        TemperatureScaling.load(tmp_path / "bad.json")
