"""What drafts add to a step at one load, learned while running: sizes that look dear by mistake are tried again."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

GRID = np.unique(np.round(2.0 ** np.arange(0, 16.01, 0.5)).astype(np.int64))  # 1, 2, 3, 4, 6, ..., more than a step has
_BETWEEN = np.sqrt(GRID[1:] * GRID[:-1]).tolist()  # where the next point of the grid becomes the nearest, by ratio
_WINDOW = 31  # measurements kept per point
_ENOUGH = 3  # measurements from which a point is believed; also what the smooth line weighs against a point's own
_OLD = 96  # steps at the load after which a point is measured anew, and doubted until then


class Typical:
    """What measurements by integer key say lately: the lower third, as of plain steps, since what disturbs only ever slows. With
    medians a number of drafts that was measured in a slow moment, and then no more, would stay as dear as it looked.
    """

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}
        self.values: dict[int, float] = {}

    def add(self, key: int, value: float) -> None:
        """Take a measurement in."""
        samples = self._samples.setdefault(key, deque(maxlen=_WINDOW))
        samples.append(value)
        self.values[key] = lower_third(samples)

    def count(self, key: int) -> int:
        """Measurements that the value of `key` rests on."""
        return len(self._samples.get(key, ()))

    def forget(self, key: int) -> None:
        """Drop what was measured for `key`. Unknown keys are ignored."""
        self._samples.pop(key, None)
        self.values.pop(key, None)


class Surcharge:
    """Seconds that drafts add at one load: a smooth line through what is typical on a coarse grid, and on it the kinks, what
    is typical of numbers of drafts that came up often enough themselves.

    Of two errors only one is found out: a number of drafts that looks too cheap is tried and measured, one that looks too dear
    never is. So a point with fewer than three measurements, or none of late, is never dearer than its neighbours that are
    known better make it, or the guess where there are none. What this loses is bounded: three steps for each point of the
    grid, every 96.

    Args:
        hopeful: take the cheaper neighbour's word for what was not measured, instead of a line between both. A point that is dear
            by a cliff (beyond the largest graph) says nothing of those before it. Costs a few steps more.
    """

    def __init__(self, *, hopeful: bool = False) -> None:
        self._hopeful = hopeful
        self._coarse = Typical()  # by place in the grid, scaled to the grid's own number
        self._exact = Typical()
        self._steps = 0
        self._last: dict[int, int] = {}  # place -> step of its last measurement
        self._kinks: tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]] | None = None

    def add(self, drafts: int, seconds: float) -> None:
        """Take in what `drafts` added to a step."""
        place = nearest(drafts)
        self._steps += 1
        if self._steps - self._last.get(place, self._steps) > _OLD:
            self._coarse.forget(place)
            for number in [number for number in self._exact.values if nearest(number) == place]:
                self._exact.forget(number)
        self._last[place] = self._steps
        self._coarse.add(place, seconds * float(GRID[place]) / drafts)
        self._exact.add(drafts, seconds)
        self._kinks = None

    def line(self, guess: NDArray[np.float64], most: int, old: bool = False) -> NDArray[np.float64]:
        """float64 [most + 1]. `guess`: seconds on the grid before anything was measured; it gives the unmeasured part its
        shape, the nearest measured points its level. `old`: what was measured may be true no more.
        """
        places = np.array(sorted(self._coarse.values), np.int64)
        if places.size:
            guess = guess * self._ratios(places, guess, old)
        line = np.interp(np.arange(most + 1), np.append(0, GRID), np.append(0.0, guess))
        if old:
            return line
        points, typical, counts = self._points()
        inside = points <= most
        points, typical, weight = points[inside], typical[inside], counts[inside]
        line[points] += (typical - line[points]) * weight / (weight + _ENOUGH)
        return line

    def _ratios(self, places: NDArray[np.int64], guess: NDArray[np.float64], old: bool) -> NDArray[np.float64]:
        """float64 [grid], measured over guessed: of the measured `places`, and linear between them; when hopeful the lower
        of the two neighbours', and below all of them the guess itself if that is less.
        """
        ratios = np.array([self._coarse.values[place] for place in places.tolist()]) / guess[places]
        sure = np.array([not old and self._believed(place) for place in places.tolist()])
        most = np.interp(places, places[sure], ratios[sure]) if sure.any() else 1.0
        ratios = np.where(sure, ratios, np.minimum(ratios, most))
        grid = np.arange(GRID.size)
        if not self._hopeful:
            return np.interp(grid, places, ratios)
        after = np.searchsorted(places, grid)
        above = np.append(ratios, ratios[-1])[after]
        below = np.append(min(1.0, ratios[0]), ratios)[np.where(np.isin(grid, places), after + 1, after)]
        return np.where(np.isin(grid, places), below, np.minimum(above, below))

    def _believed(self, place: int) -> bool:
        """Whether a place of the grid was measured often enough, and not too long ago."""
        return self._coarse.count(place) >= _ENOUGH and self._steps - self._last[place] <= _OLD

    def _points(self) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
        if self._kinks is None:
            known = [
                number
                for number in self._exact.values
                if self._exact.count(number) >= _ENOUGH and self._believed(nearest(number))
            ]
            self._kinks = (
                np.array(known, np.int64),
                np.array([self._exact.values[number] for number in known], np.float64),
                np.array([self._exact.count(number) for number in known], np.float64),
            )
        return self._kinks


def nearest(drafts: int) -> int:
    """Where in the grid a number of drafts belongs."""
    return bisect_right(_BETWEEN, drafts)


def lower_third(values: Collection[float]) -> float:
    """The value that a third of the others lie below; of up to three the least."""
    return sorted(values)[(len(values) - 1) // 3]
