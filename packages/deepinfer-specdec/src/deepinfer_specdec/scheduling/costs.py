"""What drafts add to a step, learned while running, for engines that measure no curve at start."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

_GRID = np.unique(np.round(2.0 ** np.arange(0, 12.01, 0.5)).astype(np.int64))  # 1, 2, 3, 4, 6, 8, 11, 16, ...
_WINDOW = 15  # measurements kept per point
_ENOUGH = 3  # measurements from which a point is believed
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


class StepCosts:
    """Seconds of a step with `rows` sequences and B drafts: plain(rows) + extra(B), extra by load (a power of two of rows).

    Both parts are medians of what was measured. Where nothing was, plain is interpolated, and extra is a guess scaled by what the
    measured points of the same load say about it. The guess is on the high side, so speculation starts with the surest drafts.
    """

    def __init__(self) -> None:
        self._plain = _Medians()
        self._measured_at: dict[int, list[int]] = {}  # rows -> [measurements, step of the last one]
        self._step = 0
        self._extra: dict[int, _Medians] = {}
        self._host = _Medians()

    def host_seconds(self, rows: int) -> float:
        """Time between two synchronous steps that an asynchronous loop would hide; a share of a plain step until measured."""
        return self._host.values.get(0, _HOST_SHARE * self.plain(rows))

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
        grid = np.concatenate([[0], _GRID])
        return np.interp(np.arange(most + 1), grid, np.concatenate([[0.0], self._line(rows)]))

    def observe(self, rows: int, drafts: int, seconds: float) -> None:
        """Take in a step that only decoded or verified. Times that are not positive are ignored."""
        if rows < 1 or not seconds > 0.0:
            return
        self._step += 1
        if drafts == 0:
            self._plain.add(rows, seconds)
            seen = self._measured_at.setdefault(rows, [0, 0])
            seen[:] = seen[0] + 1, self._step
            return
        if not self.known:
            return
        point = int(np.argmin(np.abs(np.log(_GRID / drafts))))
        added = max(0.0, seconds - self.plain(rows)) * float(_GRID[point]) / drafts
        self._extra.setdefault(_load(rows), _Medians()).add(point, added)

    def observe_host(self, seconds: float, step_seconds: float) -> None:
        """Take in the time from one step's end to the next one's start in the synchronous loop.

        A gap of more than half the step is not the loop's: the caller was away, or there was nothing to run.
        """
        if 0.0 < seconds < 0.5 * step_seconds:
            self._host.add(0, seconds)

    def _line(self, rows: int) -> NDArray[np.float64]:
        guess = _GRID * self.plain(rows) / (rows + _PRIOR_ROWS)
        measured = self._extra.get(_load(rows))
        if measured is None or not measured.values:
            return guess
        points = np.array(sorted(measured.values))
        ratios = np.array([measured.values[int(p)] for p in points]) / guess[points]
        return guess * np.interp(np.arange(_GRID.size), points, ratios)


def _load(rows: int) -> int:
    return (rows - 1).bit_length()
