"""Offsets beside temperatures, and the error that chance makes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from deepinfer_specdec import OnlineCalibration, TemperatureScaling, fit_sts
from deepinfer_specdec.errors import CalibrationError
from deepinfer_specdec.scheduling.calibration import (
    chance_errors,
    cumulative_errors,
    expected_calibration_error,
    fit_conditional,
    fit_scaling,
    sigmoid,
)
from hypothesis import given, settings
from hypothesis import strategies as st

OFFSETS = np.array([-1.0, -0.5, 0.8])


def blocks(count: int, seed: int, slope: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """(logits, accepted) of a head that is off by OFFSETS and a slope."""
    random = np.random.default_rng(seed)
    truth = random.normal(0.7, 1.5, (count, 3))
    accepted = np.cumprod(random.random((count, 3)) < sigmoid(truth), axis=1).sum(axis=1)
    return (truth - OFFSETS) / slope, accepted


def test_without_a_head_a_column_is_as_sure_as_it_has_proved() -> None:
    """Constant logits, chances 0.9, 0.6 and 0.3: the last is known from 2,160 of the blocks, to 0.02 at two standard errors."""
    chances = np.array([0.9, 0.6, 0.3])
    accepted = np.cumprod(np.random.default_rng(0).random((4_000, 3)) < chances, axis=1).sum(axis=1)
    nothing = np.zeros((4_000, 3), np.float32)
    known = np.minimum(accepted + 1, 3)  # up to the first that was refused
    online = OnlineCalibration(3, refit_every=4_000, fit=fit_conditional)
    online.observe(nothing, accepted, known)
    np.testing.assert_allclose(online.scaling.confidences(nothing[:1])[0], chances, atol=0.02)


def test_an_offset_is_found_where_a_temperature_cannot_help() -> None:
    """Fitted on 8,000 blocks, measured on 40,000 others (chance makes 0.7 %)."""
    fitted, others = blocks(8_000, 0), blocks(40_000, 1)
    scaling = fit_scaling(*fitted)
    # Standard errors of the offsets at 8,000 blocks, fewer of which reach the last column: 0.03 to 0.06.
    np.testing.assert_allclose(scaling.offsets, OFFSETS, atol=0.2)
    assert cumulative_errors(scaling, *others).max() < 0.02
    assert cumulative_errors(fit_sts(*fitted), *others).max() > 0.04


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 300), st.floats(0.05, 20.0))
def test_fits_keep_the_order_of_a_column_and_never_predict_worse_than_the_head(
    seed: int, count: int, slope: float
) -> None:
    """Whatever the head: temperatures stay within their limits, and the first column's likelihood, with the prior's share, does
    not fall."""
    logits, accepted = blocks(count, seed, slope)
    scaling = fit_scaling(logits, accepted)
    assert (scaling.temperatures >= 0.0999).all()
    assert (scaling.temperatures <= 10.001).all()
    assert np.isfinite(scaling.offsets).all()

    def surprise(slope: float, offset: float) -> float:
        chance = np.clip(sigmoid(logits[:, 0] * slope + offset), 1e-9, 1.0 - 1e-9)
        return -np.log(np.where(accepted > 0, chance, 1.0 - chance)).sum() + 0.5 * ((slope - 1.0) ** 2 + offset**2)

    assert surprise(1.0 / scaling.temperatures[0], scaling.offsets[0]) <= surprise(1.0, 0.0) + 1e-6


def test_what_was_not_verified_teaches_nothing_if_the_outcome_had_no_say() -> None:
    """Verified lengths drawn apart from what happened: the same offsets, from fewer blocks."""
    logits, accepted = blocks(24_000, 3)
    verified = np.random.default_rng(4).integers(1, 4, len(accepted))
    for fit in (fit_scaling, fit_conditional):
        scaling = fit(logits, np.minimum(accepted, verified), verified)
        np.testing.assert_allclose(scaling.offsets, OFFSETS, atol=0.2)


def test_blocks_known_once_they_are_rejected_teach_without_bias() -> None:
    """As the native engine has them: known is all of a block once a draft was rejected, else what was seen. The cumulative
    survival of such blocks is biased, and so is the fit that looks at it."""
    logits, accepted = blocks(40_000, 3)
    seen = np.random.default_rng(4).integers(1, 4, len(accepted))
    kept, known = np.minimum(accepted, seen), np.where(accepted < seen, 3, seen)
    np.testing.assert_allclose(fit_conditional(logits, kept, known).offsets, OFFSETS, atol=0.2)
    assert fit_scaling(logits, kept, known).offsets[2] < OFFSETS[2] - 0.5
    seen = np.minimum(seen, 2)
    scaling = fit_conditional(logits, np.minimum(accepted, seen), np.where(accepted < seen, 3, seen))
    assert scaling.offsets[2] == pytest.approx(0.0, abs=1e-6)  # nobody saw what became of the third draft


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 4_000), st.floats(0.11, 9.0), st.floats(-30.0, 30.0))
def test_alike_logits_may_count_as_one(seed: int, count: int, slope: float, shift: float) -> None:
    """At what is fitted on groups, Newton's step on the blocks themselves moves no confidence of a block by more than 0.01:
    0.004 is the most that was seen, at a hundred blocks, which leave a confidence open to 0.05.
    """
    logits, accepted = blocks(count, seed, slope)
    logits = logits + shift
    known = np.minimum(accepted + np.random.default_rng(seed).integers(0, 3, count), 3)
    scaling = fit_conditional(logits, accepted, known)
    for j in range(3):
        rows = (known > j) & (accepted >= j)
        design = np.stack([logits[rows, j], np.ones(rows.sum())], axis=1)
        values = np.array([1.0 / scaling.temperatures[j], scaling.offsets[j]])
        if not 0.1001 < values[0] < 9.99 or (values == [1.0, 0.0]).all():
            continue  # held by a limit, or back at the head as it is
        chance = sigmoid(design @ values)
        gradient = design.T @ ((accepted[rows] > j) - chance) + np.array([1.0, 0.0]) - values
        curvature = (design * (chance * (1.0 - chance))[:, None]).T @ design + np.eye(2)
        moved = sigmoid(design @ (values + np.linalg.solve(curvature, gradient)))
        assert np.abs(moved - chance).max(initial=0.0) < 0.01


def test_offsets_are_learned_online_and_kept_in_the_file(tmp_path: Path) -> None:
    online = OnlineCalibration(3, capacity=8_000, refit_every=4_000, fit=fit_scaling)
    logits, accepted = blocks(8_000, 5)
    online.observe(logits, accepted, np.full(8_000, 3))
    np.testing.assert_allclose(online.scaling.offsets, OFFSETS, atol=0.2)
    online.scaling.save(tmp_path / "sts.json")
    again = TemperatureScaling.load(tmp_path / "sts.json")
    np.testing.assert_array_equal(again.confidences(logits[:9]), online.scaling.confidences(logits[:9]))
    for content in ('{"temperatures": [1, 2], "offsets": [1]}', '{"temperatures": [1], "offsets": "far"}', "[1]"):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(CalibrationError, match="allowed"):
            TemperatureScaling.load(tmp_path / "bad.json")


def test_chance_errors_are_those_of_outcomes_that_were_foretold() -> None:
    """Their mean against outcomes drawn here, 200 times: each mean is known to 2 %."""
    random = np.random.default_rng(9)
    predicted = random.random(900)
    drawn = [expected_calibration_error(predicted, random.random(900) < predicted) for _ in range(200)]
    assert chance_errors(predicted, 200).mean() == pytest.approx(np.mean(drawn), rel=0.1)
    assert chance_errors(np.repeat(predicted, 100), 20).mean() < 0.2 * np.mean(drawn)
