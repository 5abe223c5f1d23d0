"""Sequential temperature scaling (STS): confidences that mean what they say, position after position (DSpark paper,
3.2.1).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deepinfer_specdec.errors import CalibrationError

BINS = 15
_GRID = np.logspace(-1.0, 1.0, 41)  # temperatures tried; then a finer grid around the best


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


@dataclass(frozen=True)
class TemperatureScaling:
    """Confidence of column j = sigmoid(logit / temperatures[j]). `identity(k)` leaves a head as it is."""

    temperatures: NDArray[np.float64]

    def __post_init__(self) -> None:
        values = self.temperatures
        if values.ndim != 1 or not values.size or not (np.isfinite(values).all() and (values > 0.0).all()):
            raise CalibrationError(f"temperatures {values!r}; allowed: a list of positive numbers")

    @classmethod
    def identity(cls, width: int) -> TemperatureScaling:
        """Temperature 1 everywhere."""
        return cls(np.ones(width))

    def confidences(self, logits: NDArray[np.floating]) -> NDArray[np.float32]:
        """float32 [R, K] from raw head outputs [R, K]; K at most the number of temperatures."""
        return sigmoid(logits / self.temperatures[: logits.shape[1]]).astype(np.float32)

    def save(self, path: str | Path) -> None:
        """Write `{"temperatures": [...]}`."""
        Path(path).write_text(json.dumps({"temperatures": self.temperatures.tolist()}) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> TemperatureScaling:
        """Read what `save` wrote. Raises CalibrationError when it is something else."""
        try:
            return cls(np.asarray(json.loads(Path(path).read_text())["temperatures"], dtype=np.float64))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CalibrationError(f"{path}: {error}; allowed: a JSON object with a list 'temperatures'") from error


def cumulative_errors(
    scaling: TemperatureScaling,
    logits: NDArray[np.floating],
    accepted: NDArray[np.integer],
    verified: NDArray[np.integer] | None = None,
) -> NDArray[np.float64]:
    """float64 [K], ECE of "columns 0..j all survive" for every j. Arguments as in `fit_sts`."""
    known = _verified(logits, verified)
    survival = np.cumprod(sigmoid(logits / scaling.temperatures[: logits.shape[1]]), axis=1)
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
            That does not bias it: trimming looks at the same logits that the prediction is made from.
    """
    if logits.ndim != 2 or accepted.shape != (logits.shape[0],) or logits.shape[0] == 0:
        raise CalibrationError(f"logits {logits.shape}, accepted {accepted.shape}; allowed: [n, K] and [n], n >= 1")
    known = _verified(logits, verified)
    temperatures = np.ones(logits.shape[1])
    before = np.ones(logits.shape[0])
    for j in range(logits.shape[1]):
        rows = known > j
        if rows.any():
            temperatures[j] = _best_temperature(logits[rows, j], before[rows], accepted[rows] > j)
        before = before * sigmoid(logits[:, j] / temperatures[j])
    return TemperatureScaling(temperatures)


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


class OnlineCalibration:
    """STS refitted while running from the last blocks that were verified.

    Args:
        width: columns of a draft.
        capacity: blocks kept.
        refit_every: new blocks between two fits; the first fit waits for this many.
        start: temperatures to begin with.
    """

    def __init__(
        self, width: int, capacity: int = 4096, refit_every: int = 1024, start: TemperatureScaling | None = None
    ) -> None:
        if capacity < 1 or refit_every < 1:
            raise CalibrationError(f"capacity {capacity}, refit_every {refit_every}; allowed: >= 1")
        self.scaling = start or TemperatureScaling.identity(width)
        self._logits = np.zeros((capacity, width), dtype=np.float32)
        self._accepted = np.zeros(capacity, dtype=np.int32)
        self._verified = np.zeros(capacity, dtype=np.int32)
        self._seen = 0
        self._fitted = 0
        self._refit_every = refit_every

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
        if self._seen - self._fitted >= self._refit_every:
            self.refit()

    def refit(self) -> None:
        """Fit now, from what there is."""
        n = min(self._seen, self._accepted.size)
        if n:
            self.scaling = fit_sts(self._logits[:n], self._accepted[:n], self._verified[:n])
        self._fitted = self._seen
