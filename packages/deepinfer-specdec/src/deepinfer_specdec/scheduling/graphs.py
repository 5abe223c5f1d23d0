"""What drafts add to steps that run in captured graphs: one price for each graph, and another regime beyond the largest."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from deepinfer_specdec.errors import CostCurveError
from deepinfer_specdec.scheduling.surcharge import Typical, lower_third

_ENOUGH = 3  # measurements from which a graph's price is believed, or of all graphs what a token costs
_OLD = 96  # steps at the load after which a graph is measured anew, and doubted until then
_LATELY = 9  # measurements that say what a token costs where graphs were not measured
_LEAST = 0.2  # of the first guess, which it costs at least
_HOPE = 0.04  # share of a step that a graph which never ran is taken to save: what curves of real engines jump by
_LIKE = 0.02  # share of a step that the first one of a graph may take longer than expected and be believed
_ASSUMED = 2.0  # steps of the largest graph that one beyond it takes longer, until one was measured
_TRIES = 3  # measurements kept beyond the largest graph, of which the least counts
_SHARE = 0.01  # of the time that trying steps beyond the largest graph may take
_AT_ONCE = 2  # steps beyond it in each try: the next one is planned before the first has ended


class GraphSizes:
    """Sizes in tokens that an engine pads its steps to.

    Args:
        sizes: of the graphs that it captures, increasing, from 1; none where steps run as they are.

    Attributes:
        sizes: int64 [n].
        largest: tokens of the largest; 0 without any.
        place: int64 [largest + 1], index in `sizes` of the graph that so many tokens run in.

    Raises:
        CostCurveError: sizes that do not increase.
    """

    def __init__(self, sizes: Sequence[int] | NDArray[np.integer] = ()) -> None:
        self.sizes = np.asarray(sizes, np.int64)
        if self.sizes.ndim != 1 or (self.sizes < 1).any() or (np.diff(self.sizes) <= 0).any():
            raise CostCurveError(f"graphs {self.sizes.tolist()}; allowed: increasing, from 1")
        self.largest = int(self.sizes[-1]) if self.sizes.size else 0
        self.place = np.searchsorted(self.sizes, np.arange(self.largest + 1))


class GraphSurcharge:
    """Seconds that drafts add at one load to steps that are padded to a graph: the same for all that fit into it.

    The price of a graph that was measured often enough is its own, so jags are kept. Others are on the line through those, and
    none looks dearer than that before three measurements agree. A graph that never ran is hoped to save a little on it, as some
    larger graphs do: so those that would be nearly the best are tried, once each, until one is.

    Steps beyond the largest graph say nothing about graphs, nor the other way around. They are taken to be dear until tried,
    and as dear as when last tried; a try waits until all tries together cost a hundredth of the time.

    Args:
        graphs: of the engine.
    """

    def __init__(self, graphs: GraphSizes) -> None:
        self._graphs = graphs
        self._typical = Typical()  # by place: whole steps, whose prices move with what is known of plain ones
        self._last: dict[int, int] = {}  # place -> step of its last measurement
        self._ran: set[int] = set()  # places
        self._slopes: deque[float] = deque(maxlen=_LATELY)  # seconds for each token of a graph beyond the rows' own
        self._steps = 0
        self._jumps: deque[float] = deque(maxlen=_TRIES)  # seconds, of steps beyond the largest graph over the line
        self._tried = 0  # step of the last one of those

    def add(self, rows: int, drafts: int, seconds: float, plain: float, guess: float, first: bool) -> bool:
        """Take in what drafts added to a step; returns whether this is news, which may change what is best.

        Args:
            rows, drafts: of the step, whose drafts took it to a larger graph than the rows' own.
            seconds: that it took, without `plain`.
            plain: seconds of a step of these rows without drafts.
            guess: seconds of a token before anything was measured.
            first: nothing of this size ran before. Such a step may have captured its graph, or built kernels: it is believed
                if it took no longer than expected.
        """
        self._steps += 1
        tokens, graphs = rows + drafts, self._graphs
        if tokens > graphs.largest:
            news = len(self._jumps) < _TRIES or self._steps - self._tried > 1
            self._tried = self._steps
            if not first:
                line, _ = self._line(rows, plain, guess)
                self._jumps.append(seconds - float(line[-1]) - self._slope(guess) * (tokens - graphs.largest))
            return news
        place, own = int(graphs.place[tokens]), int(graphs.place[rows])
        settled = self._believed(place)
        self._ran.add(place)
        if not first or self._expected(rows, place - own, seconds, plain, guess):
            if self._steps - self._last.get(place, self._steps) > _OLD:
                self._typical.forget(place)
            self._last[place] = self._steps
            self._typical.add(place, plain + seconds)
            self._slopes.append(seconds / float(graphs.sizes[place] - graphs.sizes[own]))
        return not settled

    def _expected(self, rows: int, number: int, seconds: float, plain: float, guess: float) -> bool:
        """Whether a graph's first step, the `number`-th from the rows' own, took no longer than it was taken to take."""
        price = float(self._line(rows, plain, guess)[0][number])
        return seconds <= price + _LIKE * (plain + price)

    def line(self, rows: int, most: int, plain: float, guess: float, old: bool = False) -> NDArray[np.float64]:
        """float64 [most + 1], seconds that 0..most drafts add. Those of none are 0, or less where drafts made steps shorter:
        then what is known of plain steps is wrong.

        Args:
            rows: of the step, no more than fit the largest graph.
            most: drafts.
            plain, guess: as `add` has them.
            old: what was measured may be true no more.
        """
        graphs, own = self._graphs, int(self._graphs.place[rows])
        line, ran = self._line(rows, plain, guess, old)
        hopes = np.where(ran, line, line - _HOPE * (plain + line))
        hopes[0] = min(0.0, line.min())
        inside = hopes[graphs.place[rows : rows + most + 1] - own]
        beyond = most + 1 - inside.size
        if not beyond:
            return inside
        whole = plain + float(line[-1])
        jump = min(self._jumps, default=_ASSUMED * whole)
        if _SHARE * (self._steps - self._tried) * whole >= _AT_ONCE * jump:
            jump = min(0.0, jump)
        outside = line[-1] + jump + self._slope(guess) * np.arange(1, beyond + 1)
        # The jump may be from far off, and the slope too steep to go back by.
        return np.append(inside, np.maximum(outside, line.min()))

    def _line(
        self, rows: int, plain: float, guess: float, old: bool = False
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """float64 [n], what the graphs add from the rows' own on, and bool [n], which of them ran."""
        own = int(self._graphs.place[rows])
        tokens = self._graphs.sizes[own:] - self._graphs.sizes[own]
        ran = np.zeros(tokens.size, bool)
        ran[[0, *(place - own for place in self._ran if place > own)]] = True
        places = sorted(place for place in self._typical.values if place > own)
        points = tokens[np.array(places, np.int64) - own]
        seconds = np.array([self._typical.values[place] for place in places]) - plain
        sure = np.array([not old and self._believed(place) for place in places], bool)
        slope = guess if old else self._slope(guess)
        likely = _through(tokens, points[sure], seconds[sure], slope)
        seconds = np.where(sure, seconds, np.minimum(seconds, np.interp(points, tokens, likely)))
        return _through(tokens, points, seconds, slope), ran

    def _slope(self, guess: float) -> float:
        """Seconds of a token where no graph was measured."""
        return guess if len(self._slopes) < _ENOUGH else max(_LEAST * guess, lower_third(self._slopes))

    def _believed(self, place: int) -> bool:
        """Whether a graph was measured often enough, and not too long ago."""
        return self._typical.count(place) >= _ENOUGH and self._steps - self._last[place] <= _OLD


def _through(
    tokens: NDArray[np.int64], points: NDArray[np.int64], seconds: NDArray[np.float64], slope: float
) -> NDArray[np.float64]:
    """float64 [n], a line at `tokens` from 0 through (points, seconds), and on with the mean slope so far; without points with
    `slope`.
    """
    if not points.size:
        return np.float64(slope) * tokens
    onwards = max(0.0, seconds[-1] / points[-1]) * (tokens - points[-1])
    return np.interp(tokens, np.append(0, points), np.append(0.0, seconds)) + np.maximum(0.0, onwards)
