"""What drafts add to a step, learned while running, for engines that measure no curve at start."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

_GRID = np.unique(np.round(2.0 ** np.arange(0, 12.01, 0.5)).astype(np.int64))  # 1, 2, 3, 4, 6, 8, 11, 16, ...
_WINDOW = 15  # measurements kept per point
_ENOUGH = 3  # measurements from which a median is believed; also what the smooth line weighs against a point's own
_NEAR = 1.25  # row counts within this ratio cost about the same per row
_FRESH = 64  # steps after which a plain measurement should be repeated: contexts grow
_HOST_SHARE = 0.06
_PRIOR_ROWS = 16  # before anything is known a draft costs as much as a row among this many


class _Medians:
    """Running medians of measurements by integer key."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}
        self.values: dict[int, float] = {}

    def add(self, key: int, value: float) -> None:
        samples = self._samples.setdefault(key, deque(maxlen=_WINDOW))
        samples.append(value)
        if len(samples) >= _ENOUGH or key not in self.values:
            self.values[key] = float(np.median(samples))

    def count(self, key: int) -> int:
        """Measurements that the median of `key` rests on."""
        return len(self._samples.get(key, ()))


class _Extra:
    """Seconds that drafts add at one load: a smooth line through medians on a coarse grid, and on it the kinks, which are
    the medians of numbers of drafts that came up often enough themselves.
    """

    def __init__(self) -> None:
        self._coarse = _Medians()  # by place in the grid, scaled to the grid's own number
        self._exact = _Medians()
        self._kinks: tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]] | None = None

    def add(self, drafts: int, seconds: float) -> None:
        place = int(np.argmin(np.abs(np.log(_GRID / drafts))))
        self._coarse.add(place, seconds * float(_GRID[place]) / drafts)
        self._exact.add(drafts, seconds)
        self._kinks = None

    def line(self, guess: NDArray[np.float64], most: int) -> NDArray[np.float64]:
        """float64 [most + 1]. `guess`: seconds on the grid before anything was measured; it gives the unmeasured part its
        shape, the nearest measured points its level.
        """
        places = np.array(sorted(self._coarse.values))
        if places.size:
            ratios = np.array([self._coarse.values[int(p)] for p in places]) / guess[places]
            guess = guess * np.interp(np.arange(_GRID.size), places, ratios)
        line = np.interp(np.arange(most + 1), np.append(0, _GRID), np.append(0.0, guess))
        points, medians, counts = self._points()
        inside = points <= most
        points, medians, weight = points[inside], medians[inside], counts[inside]
        line[points] += (medians - line[points]) * weight / (weight + _ENOUGH)
        return line

    def _points(self) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
        if self._kinks is None:
            known = [n for n in self._exact.values if self._exact.count(n) >= _ENOUGH]
            self._kinks = (
                np.array(known, np.int64),
                np.array([self._exact.values[n] for n in known], np.float64),
                np.array([self._exact.count(n) for n in known], np.float64),
            )
        return self._kinks


class StepCosts:
    """Seconds of a step with `rows` sequences and B drafts: plain(rows) + extra(B) + host, the latter two by load (a power
    of two of rows).

    All are medians of what was measured. Where nothing was, plain is interpolated, and extra is a guess scaled by what the
    measured points of the same load say about it. The guess is on the high side, so speculation starts with the surest
    drafts. No monotone shape is forced on extra: some larger steps are cheaper.
    """

    def __init__(self) -> None:
        self._plain = _Medians()
        self._measured_at: dict[int, list[int]] = {}  # rows -> [measurements, step of the last one]
        self._step = 0
        self._extra: dict[int, _Extra] = {}
        self._host = _Medians()

    @property
    def known(self) -> bool:
        """Whether any plain step was measured."""
        return bool(self._plain.values)

    def needs_plain(self, rows: int) -> bool:
        """Whether a step without drafts should be run to know what speculation is measured against: nothing like it was
        measured (twice), or not lately.
        """
        near = [seen for size, seen in self._measured_at.items() if size <= rows * _NEAR and rows <= size * _NEAR]
        return sum(seen[0] for seen in near) < 2 or self._step - max(seen[1] for seen in near) > _FRESH

    def plain(self, rows: int) -> float:
        """Seconds of a step that decodes `rows` sequences without drafts; 0 when nothing was measured."""
        values = self._plain.values
        if rows in values or not values:
            return values.get(rows, 0.0)
        sizes = sorted(values)
        if rows > sizes[-1]:  # above: in proportion, which cannot be too cheap by much
            return values[sizes[-1]] * rows / sizes[-1]
        return float(np.interp(rows, sizes, [values[size] for size in sizes]))

    def extra(self, rows: int, most: int) -> NDArray[np.float64]:
        """float64 [most + 1]: what 0..most drafts add to a step of `rows` sequences, seconds."""
        guess = _GRID * (self.plain(rows) / (rows + _PRIOR_ROWS))
        return self._extra.get(load_of(rows), _NOTHING).line(guess, most)

    def host_seconds(self, rows: int) -> float:
        """Time between two synchronous steps that an asynchronous loop would hide; a share of a plain step until measured."""
        load = load_of(rows)
        if load in self._host.values:
            return self._host.values[load]
        below = [self._host.values[known] for known in sorted(self._host.values) if known < load]
        return max([_HOST_SHARE * self.plain(rows), *below[-1:]])

    def observe(self, rows: int, drafts: int, seconds: float) -> None:
        """Take in a step that only decoded or verified. Times that are not positive are ignored."""
        if rows < 1 or not seconds > 0.0:
            return
        self._step += 1
        if drafts == 0:
            self._plain.add(rows, seconds)
            seen = self._measured_at.setdefault(rows, [0, 0])
            seen[:] = seen[0] + 1, self._step
        elif self.known:
            self._extra.setdefault(load_of(rows), _Extra()).add(drafts, max(0.0, seconds - self.plain(rows)))

    def observe_host(self, rows: int, seconds: float, step_seconds: float) -> None:
        """Take in the time from one step's end to the next one's start in the synchronous loop.

        A gap of more than half the step is not the loop's: the caller was away, or there was nothing to run.
        """
        if 0.0 < seconds < 0.5 * step_seconds:
            self._host.add(load_of(rows), seconds)


_NOTHING = _Extra()


def load_of(rows: int) -> int:
    """The load of `rows` sequences: 0 for 1, 1 for 2, 2 for 3 and 4, 3 for 5..8, ..."""
    return (rows - 1).bit_length()


def worthless_below(rows: int, seconds: NDArray[np.float64]) -> float:
    """Survival below which no draft can be worth its time.

    Plain decoding gives rows / seconds[0] tokens a second. A draft that is added at the cheapest rate the curve has
    anywhere must give at least as many; half of that is allowed for, since curves are measured.

    Args:
        rows: sequences in the step.
        seconds: float64 [n + 1], of the step with 0..n drafts.
    """
    if seconds.size < 2 or not seconds[0] > 0.0:
        return 0.0
    cheapest = float(((seconds[1:] - seconds[0]) / np.arange(1, seconds.size)).min())
    return min(1.0, 0.5 * rows * max(0.0, cheapest) / float(seconds[0]))


def scaled_tokens(tokens: NDArray[np.float64], rows: int, of: int) -> NDArray[np.float64]:
    """float64 [n + 1]: expected accepted drafts over `of` sequences from those (`expected_tokens`) over `rows` sampled ones."""
    factor = of / rows
    most = int((tokens.size - 1) * factor)
    return factor * np.interp(np.arange(most + 1) / factor, np.arange(tokens.size), tokens)
