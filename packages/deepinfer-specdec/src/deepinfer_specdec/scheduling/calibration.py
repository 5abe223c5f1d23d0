"""Sequential temperature scaling (STS): confidences that mean what they say, position after position (DSpark paper,
3.2.1).

A temperature cannot move a head whose error is an offset, and a head that was trained for another verification, or for another
temperature of the answers, has one. `fit_scaling` therefore fits an offset beside each temperature; `fit_sts` is the paper's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deepinfer_specdec.errors import CalibrationError

BINS = 15
_GRID = np.logspace(-1.0, 1.0, 41)  # temperatures tried; then a finer grid around the best
_SLOPES = (0.1, 10.0)  # positive: the order of a column's confidences stays
_ITERATIONS = 50
_PRIOR = 1.0  # weight of "the head is right", in blocks: a few blocks must not throw it over


def sigmoid(x: NDArray[np.floating]) -> NDArray[np.float64]:
    """1 / (1 + exp(-x)) without overflow."""
    return np.exp(-np.logaddexp(0.0, -np.asarray(x, dtype=np.float64)))


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
        width = logits.shape[1]
        return sigmoid(logits / self.temperatures[:width] + self.offsets[:width]).astype(np.float32)

    def survival(self, logits: NDArray[np.floating]) -> NDArray[np.float64]:
        """float64 [R, K], "columns 0..j all survive" for every j."""
        return np.cumprod(self.confidences(logits), axis=1, dtype=np.float64)

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
        slopes[j], offsets[j] = _likeliest(logits[rows, j], before[rows], accepted[rows] > j)
        before = before * sigmoid(logits[:, j] * slopes[j] + offsets[j])
    return TemperatureScaling(1.0 / slopes, offsets)


def fit_conditional(
    logits: NDArray[np.floating], accepted: NDArray[np.integer], verified: NDArray[np.integer] | None = None
) -> TemperatureScaling:
    """Fit a temperature and an offset a column, each by logistic regression among the blocks that were kept up to there.

    For blocks that are known as far as they were kept, and as a whole once a draft was rejected: whether a column's fate is seen
    does not depend on it, if all before it were kept. The cumulative survival of such blocks is biased, so the other fits must
    not be given them. The price: that a draft which is kept goes before better ones is not seen.

    Arguments as in `fit_sts`.
    """
    known = _checked(logits, accepted, verified)
    values = []
    for j in range(logits.shape[1]):
        rows = (known > j) & (accepted >= j)
        values.append(_likeliest(logits[rows, j], np.ones(int(rows.sum())), accepted[rows] > j))
    slopes, offsets = np.array(values).T
    return TemperatureScaling(1.0 / slopes, offsets)


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
    logits: NDArray[np.floating], before: NDArray[np.float64], survived: NDArray[np.bool_]
) -> tuple[float, float]:
    """Slope and offset in before * sigmoid(slope * logit + offset), by Fisher scoring with a faint prior at (1, 0)."""
    design = np.stack([np.asarray(logits, np.float64), np.ones(len(logits))], axis=1)
    prior = np.array([1.0, 0.0])

    def surprise(values: NDArray[np.floating]) -> float:
        chance = np.clip(before * sigmoid(design @ values), 1e-9, 1.0 - 1e-9)
        told = np.log(np.where(survived, chance, 1.0 - chance)).sum()
        return float(0.5 * _PRIOR * ((values - prior) ** 2).sum() - told)

    values = prior
    for _ in range(_ITERATIONS):
        own = sigmoid(design @ values)
        chance = np.clip(before * own, 1e-9, 1.0 - 1e-9)
        slope = before * own * (1.0 - own)
        spread = chance * (1.0 - chance)
        gradient = design.T @ (slope * (survived - chance) / spread) + _PRIOR * (prior - values)
        curvature = (design * (slope**2 / spread)[:, None]).T @ design + _PRIOR * np.eye(2)
        step = np.linalg.solve(curvature, gradient)
        step /= max(1.0, float(np.abs(step).max()))  # far from the optimum the curvature says little
        values = values + step
        values[0] = np.clip(values[0], *_SLOPES)
        if np.abs(step).max() < 1e-7:
            break
    if surprise(values) > surprise(prior):  # scoring may step too far where few blocks lie in the tails
        values = prior
    return float(values[0]), float(values[1])


Fit = Callable[[NDArray[np.floating], NDArray[np.integer], NDArray[np.integer]], TemperatureScaling]
"""(logits, accepted, verified) -> scaling."""


class OnlineCalibration:
    """Temperatures refitted while running from the last blocks that were verified.

    Args:
        width: columns of a draft.
        capacity: blocks kept.
        refit_every: new blocks between two fits; the first fit waits for this many.
        calls_apart: calls of `observe`, one a step, between two fits at least: a fit of 4,096 blocks takes 8 to 17 ms, which
            steps of many rows, that fill `refit_every` in a few calls, would spend over and over.
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
