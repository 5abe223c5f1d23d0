"""Sequential temperature scaling (STS): confidences that mean what they say, position after position (DSpark paper,
3.2.1).

A temperature cannot move a head whose error is an offset, and a head that was trained for another verification, or for another
temperature of the answers, has one. `fit_scaling` therefore fits an offset beside each temperature; `fit_sts` is the paper's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deepinfer_specdec.errors import CalibrationError

BINS = 15
_GRID = np.logspace(-1.0, 1.0, 41)  # temperatures tried; then a finer grid around the best
_SLOPES = (0.1, 10.0)  # positive: the order of a column's confidences stays
_ITERATIONS = 50
_FINENESS, _GROUPS = 16, 256  # groups of alike logits: to a standard deviation, and in all
_PRIOR = 1.0  # weight of "the head is right", in blocks: a few blocks must not throw it over


def sigmoid(x: NDArray[np.floating]) -> NDArray[np.float64]:
    """1 / (1 + exp(-x)) without overflow."""
    x = np.asarray(x, dtype=np.float64)
    small = np.exp(-np.abs(x))
    return np.where(x >= 0.0, 1.0, small) / (1.0 + small)


def expected_calibration_error(predicted: NDArray[np.floating], happened: NDArray[np.bool_], bins: int = BINS) -> float:
    """ECE of `predicted` probabilities [n] against outcomes [n]: mean |confidence - frequency| over equal-width bins."""
    if predicted.size == 0:
        return 0.0
    bucket = np.minimum((predicted * bins).astype(np.int64), bins - 1)
    gap = np.bincount(bucket, weights=predicted - happened, minlength=bins)
    return float(np.abs(gap).sum() / predicted.size)


def chance_errors(predicted: NDArray[np.floating], draws: int = 100, seed: int = 0) -> NDArray[np.float64]:
    """float64 [draws], the ECE that outcomes drawn from `predicted` [n] have: what n outcomes show of a perfect prediction."""
    random = np.random.default_rng(seed)
    return np.array(
        [expected_calibration_error(predicted, random.random(predicted.shape) < predicted) for _ in range(draws)]
    )


@dataclass(frozen=True)
class TemperatureScaling:
    """Confidence of column j = sigmoid(logit / temperatures[j] + offsets[j]). `identity(k)` leaves a head as it is.

    No offsets means zeros.
    """

    temperatures: NDArray[np.float64]
    offsets: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        values = self.temperatures
        if values.ndim != 1 or not values.size or not (np.isfinite(values).all() and (values > 0.0).all()):
            raise CalibrationError(f"temperatures {values!r}; allowed: a list of positive numbers")
        if not self.offsets.size:
            object.__setattr__(self, "offsets", np.zeros(values.size))
        if self.offsets.shape != values.shape or not np.isfinite(self.offsets).all():
            raise CalibrationError(f"offsets {self.offsets!r}; allowed: none, or {values.size} finite numbers")

    @classmethod
    def identity(cls, width: int) -> TemperatureScaling:
        """Temperature 1 everywhere."""
        return cls(np.ones(width))

    def confidences(self, logits: NDArray[np.floating]) -> NDArray[np.float32]:
        """float32 [R, K] from raw head outputs [R, K]; K at most the number of temperatures."""
        halved = (
            np.asarray(logits, np.float32) * self._halves[0, : logits.shape[1]] + self._halves[1, : logits.shape[1]]
        )
        return np.asarray(0.5 + 0.5 * np.tanh(halved), np.float32)

    def survival(self, logits: NDArray[np.floating]) -> NDArray[np.float32]:
        """float32 [R, K], "columns 0..j all survive" for every j."""
        survival = self.confidences(logits)
        for column in range(1, logits.shape[1]):  # an accumulation along short rows takes several times as long
            survival[:, column] *= survival[:, column - 1]
        return survival

    @cached_property
    def _halves(self) -> NDArray[np.float32]:
        return np.stack([0.5 / self.temperatures, 0.5 * self.offsets]).astype(np.float32)

    def save(self, path: str | Path) -> None:
        """Write `{"temperatures": [...]}`, and `"offsets"` if there are any."""
        kept = {"temperatures": self.temperatures.tolist()}
        if self.offsets.any():
            kept["offsets"] = self.offsets.tolist()
        Path(path).write_text(json.dumps(kept) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> TemperatureScaling:
        """Read what `save` wrote. Raises CalibrationError when it is something else."""
        try:
            raw = json.loads(Path(path).read_text())
            found = [np.asarray(raw["temperatures"], np.float64), np.asarray(raw.get("offsets", []), np.float64)]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CalibrationError(f"{path}: {error}; allowed: a JSON object with a list 'temperatures'") from error
        return cls(*found)


def cumulative_errors(
    scaling: TemperatureScaling,
    logits: NDArray[np.floating],
    accepted: NDArray[np.integer],
    verified: NDArray[np.integer] | None = None,
) -> NDArray[np.float64]:
    """float64 [K], ECE of "columns 0..j all survive" for every j. Arguments as in `fit_sts`."""
    known, survival = _verified(logits, verified), scaling.survival(logits)
    errors = [
        expected_calibration_error(survival[known > j, j], accepted[known > j] > j) for j in range(logits.shape[1])
    ]
    return np.asarray(errors)


def fit_sts(
    logits: NDArray[np.floating], accepted: NDArray[np.integer], verified: NDArray[np.integer] | None = None
) -> TemperatureScaling:
    """Fit one temperature a column, in order: each minimises the ECE of the cumulative survival, the earlier ones
    fixed.

    Args:
        logits: [n, K], raw head outputs of n blocks.
        accepted: [n], drafts of each block that were accepted.
        verified: [n], drafts that were verified; None for all K. A column learns only from blocks that verified it.
            That does not bias it as long as it was decided before the outcome: trimming looks at the same logits that the
            prediction is made from.
    """
    known = _checked(logits, accepted, verified)
    temperatures = np.ones(logits.shape[1])
    before = np.ones(logits.shape[0])
    for j in range(logits.shape[1]):
        rows = known > j
        if rows.any():
            temperatures[j] = _best_temperature(logits[rows, j], before[rows], accepted[rows] > j)
        before = before * sigmoid(logits[:, j] / temperatures[j])
    return TemperatureScaling(temperatures)


def fit_scaling(
    logits: NDArray[np.floating], accepted: NDArray[np.integer], verified: NDArray[np.integer] | None = None
) -> TemperatureScaling:
    """Fit a temperature and an offset a column, in order: each pair maximises the likelihood of the cumulative survival,
    the earlier ones fixed. Arguments as in `fit_sts`.
    """
    known = _checked(logits, accepted, verified)
    slopes, offsets = np.ones(logits.shape[1]), np.zeros(logits.shape[1])
    before = np.ones(logits.shape[0])
    for j in range(logits.shape[1]):
        rows = known > j
        (slopes[j],), (offsets[j],) = _likeliest(logits[None, rows, j], before[None, rows], accepted[None, rows] > j)
        before = before * sigmoid(logits[:, j] * slopes[j] + offsets[j])
    return TemperatureScaling(1.0 / slopes, offsets)


def fit_conditional(
    logits: NDArray[np.floating], accepted: NDArray[np.integer], verified: NDArray[np.integer] | None = None
) -> TemperatureScaling:
    """Fit a temperature and an offset a column, each by logistic regression among the blocks that were kept up to there.

    For blocks that are known as far as they were kept, and as a whole once a draft was rejected: whether a column's fate is seen
    does not depend on it, if all before it were kept. The cumulative survival of such blocks is biased, so the other fits must
    not be given them. The price: that a draft which is kept goes before better ones is not seen.

    Logits of a column that lie within a sixteenth of its standard deviation count as their mean, so that a fit of 4,096 blocks
    takes a millisecond: it may be made between two steps.

    Arguments as in `fit_sts`.
    """
    known, columns = _checked(logits, accepted, verified)[:, None], np.arange(logits.shape[1])
    used = (known > columns) & (accepted[:, None] >= columns)
    means, kept, blocks = _grouped(logits, used, used & (accepted[:, None] > columns))
    slopes, offsets = _likeliest(means, np.ones(1), kept, blocks)
    return TemperatureScaling(1.0 / slopes, offsets)


def _grouped(
    logits: NDArray[np.floating], used: NDArray[np.bool_], kept: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Groups of alike logits among the `used` of [n, K]: their mean, the share of them that was `kept`, and how many they are;
    [K, groups] each.
    """
    columns, half = logits.shape[1], _GROUPS // 2
    values, counts = np.where(used, logits, 0.0).astype(np.float64), np.maximum(1, used.sum(axis=0))
    away = values - values.sum(axis=0) / counts
    spread = np.sqrt((away**2 * used).sum(axis=0) / counts)
    place = np.rint(np.clip(away * (_FINENESS / np.where(spread > 0.0, spread, 1.0)), 1 - half, half - 1)).astype(
        np.int64
    )
    place = (place + half + _GROUPS * np.arange(columns)).ravel()
    weights = [np.asarray(each, np.float64).ravel() for each in (used, values, kept)]
    sums = np.stack([np.bincount(place, each, columns * _GROUPS) for each in weights]).astype(np.float64)
    blocks, means, share = sums.reshape(3, columns, _GROUPS)
    there = np.maximum(blocks, 1.0)
    return means / there, share / there, blocks


def _checked(
    logits: NDArray[np.floating], accepted: NDArray[np.integer], verified: NDArray[np.integer] | None
) -> NDArray[np.integer]:
    if logits.ndim != 2 or accepted.shape != (logits.shape[0],) or logits.shape[0] == 0:
        raise CalibrationError(f"logits {logits.shape}, accepted {accepted.shape}; allowed: [n, K] and [n], n >= 1")
    return _verified(logits, verified)


def _verified(logits: NDArray[np.floating], verified: NDArray[np.integer] | None) -> NDArray[np.integer]:
    return np.full(logits.shape[0], logits.shape[1]) if verified is None else verified


def _best_temperature(logits: NDArray[np.floating], before: NDArray[np.float64], survived: NDArray[np.bool_]) -> float:
    best = 1.0
    for grid in (_GRID, None):
        tried = grid if grid is not None else best * np.logspace(-0.05, 0.05, 11)
        errors = [expected_calibration_error(before * sigmoid(logits / t), survived) for t in tried]
        lowest = min(errors)
        # Ties (small samples have many) go to the temperature nearest 1: the least interference.
        best = float(
            min((t for t, e in zip(tried, errors, strict=True) if e <= lowest + 1e-12), key=lambda t: abs(np.log(t)))
        )
    return best


def _likeliest(
    logits: NDArray[np.floating],
    before: NDArray[np.float64],
    kept: NDArray[np.bool_] | NDArray[np.float64],
    blocks: NDArray[np.float64] | float = 1.0,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Slopes and offsets [C] in before * sigmoid(slope * logit + offset), by Fisher scoring with a faint prior at (1, 0).

    Args:
        logits, kept: [C, n], of C columns at once; `kept` is 0 or 1, or the share of that many `blocks`.
        before, blocks: [C, n] or its like.
    """
    logits = np.asarray(logits, np.float64)
    prior = np.array([1.0, 0.0])

    def surprise(values: NDArray[np.floating]) -> NDArray[np.float64]:
        chance = np.clip(before * sigmoid(values[:, :1] * logits + values[:, 1:]), 1e-9, 1.0 - 1e-9)
        told = (blocks * (kept * np.log(chance) + (1.0 - kept) * np.log(1.0 - chance))).sum(axis=1)
        return 0.5 * _PRIOR * ((values - prior) ** 2).sum(axis=1) - told

    values = np.tile(prior, (len(logits), 1))
    for _ in range(_ITERATIONS):
        own = sigmoid(values[:, :1] * logits + values[:, 1:])
        chance = np.clip(before * own, 1e-9, 1.0 - 1e-9)
        slope = before * own * (1.0 - own)
        weight = blocks * slope / (chance * (1.0 - chance))
        pull, bend = weight * (kept - chance), weight * slope
        gradient = np.stack([(pull * logits).sum(axis=1), pull.sum(axis=1)], axis=1) + _PRIOR * (prior - values)
        mixed, flat = (bend * logits).sum(axis=1), bend.sum(axis=1)
        curvature = np.stack([(bend * logits**2).sum(axis=1), mixed, mixed, flat], axis=1).reshape(-1, 2, 2)
        step = np.linalg.solve(curvature + _PRIOR * np.eye(2), gradient[:, :, None])[:, :, 0]
        # Far from the optimum the curvature says little.
        step /= np.maximum(1.0, np.abs(step).max(axis=1, keepdims=True))
        values = values + step
        values[:, 0] = np.clip(values[:, 0], *_SLOPES)
        if np.abs(step).max() < 1e-7:
            break
    # Scoring may step too far where few blocks lie in the tails.
    values[surprise(values) > surprise(np.tile(prior, (len(logits), 1)))] = prior
    return values[:, 0], values[:, 1]


Fit = Callable[[NDArray[np.floating], NDArray[np.integer], NDArray[np.integer]], TemperatureScaling]
"""(logits, accepted, verified) -> scaling."""


class OnlineCalibration:
    """Temperatures refitted while running from the last blocks that were verified.

    Args:
        width: columns of a draft.
        capacity: blocks kept.
        refit_every: new blocks between two fits; the first fit waits for this many.
        calls_apart: calls of `observe`, one a step, between two fits at least: steps of many rows, that fill `refit_every` in a
            few calls, would fit over and over. A fit of 4,096 blocks takes 1 ms (`fit_conditional`) to tens of them.
        start: temperatures to begin with.
        fit: how; the others where the head may have been trained for another verification or temperature, see there.
    """

    def __init__(
        self,
        width: int,
        capacity: int = 4096,
        refit_every: int = 1024,
        start: TemperatureScaling | None = None,
        fit: Fit = fit_sts,
        calls_apart: int = 128,
    ) -> None:
        if capacity < 1 or refit_every < 1 or calls_apart < 1:
            raise CalibrationError(
                f"capacity {capacity}, refit_every {refit_every}, calls_apart {calls_apart}; allowed: >= 1"
            )
        self.scaling = start or TemperatureScaling.identity(width)
        self._logits = np.zeros((capacity, width), dtype=np.float32)
        self._accepted = np.zeros(capacity, dtype=np.int32)
        self._verified = np.zeros(capacity, dtype=np.int32)
        self._seen = 0
        self._fitted = 0
        self._refit_every = refit_every
        self._calls_apart = calls_apart
        self._calls = calls_apart  # since the last fit; the first one waits for blocks alone
        self._fit = fit

    def observe(
        self, logits: NDArray[np.floating], accepted: NDArray[np.integer], verified: NDArray[np.integer]
    ) -> None:
        """Take R blocks in: head outputs [R, K], drafts accepted and verified [R]. Blocks without a verified draft are
        skipped.
        """
        used = np.flatnonzero(verified > 0)
        at = (self._seen + np.arange(used.size)) % self._accepted.size
        self._logits[at] = logits[used]
        self._accepted[at] = accepted[used]
        self._verified[at] = verified[used]
        self._seen += used.size
        self._calls += 1
        if self._seen - self._fitted >= self._refit_every and self._calls >= self._calls_apart:
            self.refit()

    def refit(self) -> None:
        """Fit now, from what there is."""
        n = min(self._seen, self._accepted.size)
        if n:
            self.scaling = self._fit(self._logits[:n], self._accepted[:n], self._verified[:n])
        self._fitted, self._calls = self._seen, 0
