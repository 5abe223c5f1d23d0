"""What a step costs: measured seconds as a function of the tokens in it, kept jagged, refreshed while running."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer_specdec.errors import CostCurveError


@dataclass(frozen=True, slots=True)
class CostOptions:
    """How a curve is refreshed.

    Attributes:
        window: recent measurements kept per point; their median counts.
        refresh_every: measurements between two recomputations of the table.
        min_samples: measurements that a new point needs before the curve uses it.
    """

    window: int = 15
    refresh_every: int = 16
    min_samples: int = 3

    def __post_init__(self) -> None:
        for name in ("window", "refresh_every", "min_samples"):
            if getattr(self, name) < 1:
                raise CostCurveError(f"{name} {getattr(self, name)}; allowed: >= 1")


class CostCurve:
    """Seconds of a step by its size. Sizes up to `padded_to` run padded to the next measured point (graph buckets) and
    are priced there; above it the curve is linear between points and goes on with the last slope.

    No monotone shape is forced: tile effects make some larger steps cheaper, and those are the ones to aim for.

    Args:
        sizes: measured sizes, tokens (or requests, for a drafter's curve), increasing, >= 1.
        seconds: time at each size, > 0.
        padded_to: largest size that runs in a padded graph; 0 when nothing is padded (CPU).
        options: how `observe` refreshes the curve.
    """

    def __init__(
        self,
        sizes: Sequence[int] | NDArray[np.integer],
        seconds: Sequence[float] | NDArray[np.floating],
        padded_to: int = 0,
        options: CostOptions | None = None,
    ) -> None:
        self._options = options or CostOptions()
        at = np.asarray(sizes, dtype=np.int64)
        took = np.asarray(seconds, dtype=np.float64)
        if at.ndim != 1 or at.shape != took.shape or at.size == 0:
            raise CostCurveError(f"{at.shape} sizes and {took.shape} times; allowed: two equal lists, not empty")
        if at[0] < 1 or (np.diff(at) <= 0).any():
            raise CostCurveError(f"sizes {at.tolist()}; allowed: increasing, from 1")
        if not (np.isfinite(took).all() and (took > 0).all()):
            raise CostCurveError(f"seconds {took.tolist()}; allowed: finite and > 0")
        if padded_to and padded_to not in at:
            raise CostCurveError(f"padded_to {padded_to}; allowed: 0 or one of {at.tolist()}")
        self._padded_to = padded_to
        self._base: dict[int, float] = dict(zip(at.tolist(), took.tolist(), strict=True))
        self._samples: dict[int, deque[float]] = {}
        self._since_refresh = 0
        self._table = np.empty(0)
        self._fit()

    @property
    def sizes(self) -> NDArray[np.int64]:
        """int64 [n], the points that the curve rests on."""
        return self._points

    @property
    def graphs(self) -> NDArray[np.int64]:
        """int64 [n], sizes that steps are padded to."""
        return self._points[self._points <= self._padded_to]

    def seconds(self, sizes: NDArray[np.integer] | int) -> NDArray[np.float64]:
        """Seconds of steps of `sizes` (any shape); 0 for size 0. Does not change the curve."""
        wanted = np.asarray(sizes, dtype=np.int64)
        top = int(wanted.max(initial=0))
        if top >= self._table.size:
            self._table = self._evaluate(np.arange(max(64, 2 * top)))
        return self._table[wanted]

    def span(self, first: int, count: int) -> NDArray[np.float64]:
        """float64 [count], seconds of the sizes first, first + 1, ...: a view, not to be written."""
        if first + count > self._table.size:
            self._table = self._evaluate(np.arange(max(64, 2 * (first + count))))
        return self._table[first : first + count]

    def observe(self, size: int, seconds: float) -> None:
        """Take a measured step in. Times that are not positive and finite are ignored (a clock that stepped back)."""
        if size < 1 or not (seconds > 0.0 and np.isfinite(seconds)):
            return
        point = self._bucket(size)
        self._samples.setdefault(point, deque(maxlen=self._options.window)).append(seconds)
        self._since_refresh += 1
        if self._since_refresh >= self._options.refresh_every:
            self._refresh()

    def _bucket(self, size: int) -> int:
        """The point that a measured step of `size` belongs to: its graph, or itself when nothing is padded."""
        if size <= self._padded_to:
            return int(self._points[np.searchsorted(self._points, size)])
        return size

    def _refresh(self) -> None:
        self._since_refresh = 0
        for point, samples in self._samples.items():
            if len(samples) >= self._options.min_samples:
                self._base[point] = float(np.median(samples))
        self._fit()

    def _fit(self) -> None:
        self._points = np.array(sorted(self._base), dtype=np.int64)
        self._times = np.array([self._base[point] for point in self._points.tolist()])
        self._table = self._evaluate(np.arange(max(64, self._table.size, 2 * int(self._points[-1]))))

    def _evaluate(self, sizes: NDArray[np.int64]) -> NDArray[np.float64]:
        points, times = self._points, self._times
        result = np.interp(sizes, points, times)
        if points.size > 1:  # beyond the last point: its slope over the upper half of the curve, never falling
            half = points.size // 2 if points.size > 2 else 0
            slope = max(0.0, (times[-1] - times[half]) / (points[-1] - points[half]))
            result = np.where(sizes > points[-1], times[-1] + slope * (sizes - points[-1]), result)
        if self._padded_to:
            bucket = np.minimum(np.searchsorted(points, sizes), points.size - 1)
            result = np.where(sizes <= self._padded_to, times[bucket], result)
        result[sizes == 0] = 0.0
        return result
