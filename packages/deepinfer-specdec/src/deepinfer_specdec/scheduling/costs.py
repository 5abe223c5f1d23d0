"""What drafts add to a step, learned while running, for engines that measure no curve at start."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from deepinfer_specdec.scheduling.graphs import GraphSizes, GraphSurcharge
from deepinfer_specdec.scheduling.surcharge import GRID, Surcharge, Typical, lower_third, nearest

# Steps after which a load's drafts are believed to be that dear no more: where they look dear nobody measures.
_OLD = 256
_STALE = 16  # times the steps below, of whatever size, after which plain ones are measured anew
_NEAR = 1.25  # row counts within this ratio cost about the same per row
_FAR = 2.0  # and within this one enough for a gain that leaves no doubt
_MODEST = 1.35  # gain below which what it is measured against must be known well
_OFTEN, _RARELY = 32, 128  # steps of a size between two without drafts, for modest and for larger gains
_PLAIN_WINDOW = 7  # plain steps kept for a range of rows: few, since they are measured rarely while speculation is on
_HOST_SHARE = 0.06  # of a plain step, that the host takes between two synchronous ones until that was measured
_FIRST_GUESS = 0.25  # of a row's cost: what a draft costs before any was verified, where steps are bound by memory
_FADES = 128  # steps at a load without drafts after which what they are guessed to cost has halved
_MOST_FADES = 6
_KEPT = 8  # steps that an answer is kept at most
# Before anything is known a draft costs as much as a row among this many more; also the rows that hide half.
_PRIOR_ROWS = 16


class _Plain:
    """Seconds of steps without drafts by their rows: a typical one for ranges of half an octave, linear between them.

    Not medians but lower thirds: other programs only ever make a step slower, and what makes plain steps look slow keeps
    speculation on where it does not pay.
    """

    def __init__(self) -> None:
        self._samples: dict[int, deque[tuple[int, float]]] = {}
        self._line: tuple[list[float], list[float]] | None = None

    def __bool__(self) -> bool:
        return bool(self._samples)

    def add(self, rows: int, seconds: float) -> None:
        self._samples.setdefault(round(2.0 * math.log2(rows)), deque(maxlen=_PLAIN_WINDOW)).append((rows, seconds))
        self._line = None

    def at(self, rows: int) -> float:
        """Seconds; 0 when nothing was measured. Above all that was, in proportion, which cannot be too cheap by much."""
        if not self._samples:
            return 0.0
        if self._line is None:
            ranges = sorted(self._samples.items())
            self._line = (
                [sum(rows for rows, _ in samples) / len(samples) for _, samples in ranges],
                [lower_third([seconds for _, seconds in samples]) for _, samples in ranges],
            )
        sizes, seconds = self._line
        return seconds[-1] * rows / sizes[-1] if rows > sizes[-1] else float(np.interp(rows, sizes, seconds))


def ahead_costs(*, builds: bool, graphs: Sequence[int] | NDArray[np.integer] = ()) -> StepCosts:
    """Prices of steps with drafts for a loop that runs ahead and measures nothing at start: the native engine's and the
    simulator's. For `builds` and `graphs` see `StepCosts`.
    """
    return StepCosts(1.0 if builds else _FIRST_GUESS, builds=builds, graphs=graphs)


class StepCosts:
    """What the loop's steps take, from the lower thirds of what was measured.

    A step of the loop that runs ahead takes `ahead(rows)`. A synchronous one takes `alone(rows)`, `extra(rows, B)` for its B
    drafts, and `host_seconds(rows)` between it and the next; the last two are learned by load (a power of two of rows).

    Where extra was not measured it is a guess, scaled by what the measured points of the same load say about it. The first
    guess is on the high side, so speculation starts with the surest drafts; later ones are hopeful (`Surcharge`). No monotone
    shape is forced on it: some larger steps are cheaper.

    Args:
        first_guess: share of what a row costs that a draft is taken to cost at first. 1 is on the high side: nothing is lost
            by it where a few sure drafts are verified anyway and make prices known. Where verifying is cheap a high guess
            is found out late (without `builds`), or never: no draft looks worth it.
        builds: whether the first step of a size in tokens builds kernels for it; if not, the first of a range of sizes.
        graphs: sizes in tokens that steps are padded to, see `GraphSizes`. Then drafts are priced by graph (`GraphSurcharge`).
    """

    def __init__(
        self, first_guess: float = 1.0, *, builds: bool = True, graphs: Sequence[int] | NDArray[np.integer] = ()
    ) -> None:
        self._first_guess, self._builds = first_guess, builds
        self._graphs = GraphSizes(graphs)
        self._ahead, self._alone = _Plain(), _Plain()
        self._plain_seen: dict[int, list[int]] = {}  # rows -> [plain measurements, step of the last one]
        self._unchecked: dict[int, int] = {}  # rows -> steps with drafts since a plain one like them
        self._step = 0
        self._extra: dict[int, Surcharge] = {}
        self._padded: dict[int, GraphSurcharge] = {}  # of rows that a graph serves
        self._unpriced = GraphSurcharge(self._graphs)
        self._undrafted: dict[int, int] = {}  # load -> steps without drafts since the last with some
        self._sizes: set[int] = set()  # that ran, see `_size`
        self._extra_seen: dict[int, tuple[int, int]] = {}  # load -> measurements, step of the last one
        self._host = Typical()
        # Answers, and the steps they are good until.
        self._kept: dict[tuple[int, int, bool], tuple[int, NDArray[np.float64]]] = {}

    @property
    def known(self) -> bool:
        """Whether any step without drafts was measured."""
        return bool(self._ahead) or bool(self._alone)

    def needs_plain(self, rows: int, gain: float = 1.0) -> bool:
        """Whether a step without drafts should be run to know what a `gain` is measured against.

        One is wanted where nothing like it was measured twice, or not for some steps like it, or not for many of any kind;
        the larger the gain, the less: what would be decided alike with another price need not be priced better.
        """
        doubtful = gain < _MODEST
        near = _NEAR if doubtful and not self._between(rows) else _FAR
        seen = [seen for size, seen in self._plain_seen.items() if _alike(size, rows, near)]
        if sum(count for count, _ in seen) < 2:
            return True
        fresh = _OFTEN if doubtful else _RARELY
        unchecked = sum(steps for size, steps in self._unchecked.items() if _alike(size, rows, near))
        return unchecked > fresh or self._step - max(step for _, step in seen) > _STALE * fresh

    def ahead(self, rows: int) -> float:
        """Seconds that a step of `rows` sequences takes the loop that runs ahead; 0 when nothing was measured.

        Never more than a synchronous step: where that is known better (measured later), it bounds this.
        """
        if not self._alone:
            return self._ahead.at(rows)
        bound = self._alone.at(rows) + self.host_seconds(rows)
        return min(self._ahead.at(rows), bound) if self._ahead else bound

    def least(self, rows: int) -> float:
        """What speculation must beat: `ahead`, but where that is bounded by a synchronous step, a part of the host's time is
        taken to be hidden by the other loop: next to none where steps are short and two busy cores do both, most where they are
        long.
        """
        seen = _PRIOR_ROWS / (rows + _PRIOR_ROWS)
        return min(self.ahead(rows), self.alone(rows) + seen * self.host_seconds(rows))

    def alone(self, rows: int) -> float:
        """Seconds of a synchronous step of `rows` sequences without drafts; 0 when nothing was measured.

        Never more than a step of the other loop, which bounds it where only fewer rows were measured.
        """
        if not self._alone:
            return self._ahead.at(rows)
        return min(self._alone.at(rows), self._ahead.at(rows)) if self._ahead else self._alone.at(rows)

    def extra(self, rows: int, most: int) -> NDArray[np.float64]:
        """float64 [most + 1]: what 0..most drafts add to a step of `rows` sequences, seconds."""
        load, guess = load_of(rows), self._guess(rows)
        old = self._step - self._extra_seen.get(load, _NEVER)[1] > _OLD
        if rows <= self._graphs.largest:
            return self._padded.get(load, self._unpriced).line(rows, most, self.alone(rows), guess, old)
        return self._extra.get(load, _NOTHING).line(GRID * np.float64(guess), most, old)

    def host_seconds(self, rows: int) -> float:
        """Time between two synchronous steps that the other loop would hide; a share of a plain step until measured."""
        load = load_of(rows)
        if load in self._host.values:
            return self._host.values[load]
        below = [self._host.values[known] for known in sorted(self._host.values) if known < load]
        return max([_HOST_SHARE * self.alone(rows), *below[-1:]])

    def synchronous(self, rows: int, most: int) -> NDArray[np.float64]:
        """float64 [most + 1], seconds from one synchronous step to the next with 0..most drafts. Not to be written: the more
        steps were measured, the longer the answer is kept, since one more hardly moves a price.
        """
        return self._keep(
            (rows, most, True), lambda: self.alone(rows) + self.extra(rows, most) + self.host_seconds(rows)
        )

    def drafting(self, rows: int, most: int) -> NDArray[np.float64]:
        """float64 [most + 1], seconds of a step with 0..most drafts, without the time between two. Kept and not to be written,
        as `synchronous` has it.
        """
        return self._keep((rows, most, False), lambda: self.alone(rows) + self.extra(rows, most))

    def _keep(self, key: tuple[int, int, bool], make: Callable[[], NDArray[np.float64]]) -> NDArray[np.float64]:
        kept = self._kept.get(key)
        if kept is None or self._step >= kept[0]:
            good_for = min(_KEPT, self._extra_seen.get(load_of(key[0]), _NEVER)[0] // _KEPT)
            kept = self._kept[key] = self._step + good_for, make()
        return kept[1]

    def fixed_share(self, rows: int) -> float:
        """Share of a plain step's time, 0..1, that it would take with hardly any rows: reading the weights."""
        few = max(1, rows // 2)
        if few == rows:
            return 1.0
        whole = self.ahead(rows)
        per_row = (whole - self.ahead(few)) / (rows - few)
        return float(np.clip(1.0 - rows * per_row / whole, 0.0, 1.0)) if whole > 0.0 else 1.0

    def observe_ahead(self, rows: int, seconds: float) -> None:
        """Take in a step of the loop that runs ahead, from the results before to its own. Times <= 0 are ignored."""
        if rows >= 1 and seconds > 0.0:
            self._sizes.add(self._size(rows))
            self._see_plain(rows)
            self._ahead.add(rows, seconds)

    def observe(self, rows: int, drafts: int, seconds: float) -> bool:
        """Take in a synchronous step that only decoded or verified. Times that are not positive are ignored.

        Returns whether the step was like those to come. The first of its size in tokens is not: kernels are built for it, or
        graphs captured, so with drafts it says nothing about what they cost.
        """
        if rows < 1 or not seconds > 0.0:
            return False
        size = self._size(rows + drafts)
        typical = size in self._sizes
        self._sizes.add(size)
        load = load_of(rows)
        if drafts == 0:
            self._see_plain(rows)
            self._alone.add(rows, seconds)
            self._undrafted[load] = self._undrafted.get(load, 0) + 1
            return typical
        self._undrafted[load] = 0
        self.pass_drafts(rows)
        if self.known and (typical or rows <= self._graphs.largest):
            self._price(load, rows, drafts, seconds, typical)
            self._extra_seen[load] = self._extra_seen.get(load, _NEVER)[0] + 1, self._step
        return typical

    def _price(self, load: int, rows: int, drafts: int, seconds: float, typical: bool) -> None:
        plain = self.alone(rows)
        if rows > self._graphs.largest:
            surcharge = self._extra.setdefault(load, Surcharge(hopeful=not self._builds))
            surcharge.add(drafts, max(0.0, seconds - plain))
            return
        if self._size(rows) == self._size(rows + drafts):
            self._alone.add(rows, seconds)  # the very graph of a step without drafts
            return
        padded = self._padded.setdefault(load, GraphSurcharge(self._graphs))
        if padded.add(rows, drafts, seconds - plain, plain, self._guess(rows), not typical):
            self._kept.clear()

    def pass_drafts(self, rows: int) -> None:
        """A step of `rows` sequences verified drafts: what plain ones take is known less well (`needs_plain`)."""
        self._step += 1
        self._unchecked[rows] = self._unchecked.get(rows, 0) + 1

    def observe_host(self, rows: int, seconds: float, step_seconds: float) -> None:
        """Take in the time from one step's end to the next one's start in the synchronous loop.

        A gap as long as the step is not the loop's: the caller was away, or there was nothing to run.
        """
        if 0.0 < seconds < step_seconds:
            self._host.add(load_of(rows), seconds)

    def _guess(self, rows: int) -> float:
        """Seconds that a draft is taken to cost before any was verified. What looks dear is never found out to be cheap: so where
        no kernels are built for a try, it is the less the longer none was worth one.
        """
        guess = self._first_guess * self.alone(rows) / (rows + _PRIOR_ROWS)
        fades = 0 if self._builds else min(_MOST_FADES, self._undrafted.get(load_of(rows), 0) // _FADES)
        return guess * 0.5**fades

    def _size(self, tokens: int) -> int:
        """What is the same for all numbers of tokens whose steps run the same kernels or the same graph."""
        if tokens <= self._graphs.largest:
            return int(self._graphs.place[tokens])
        return self._graphs.sizes.size + (tokens if self._builds else nearest(tokens))

    def _between(self, rows: int) -> bool:
        """Whether plain steps of fewer and of more sequences were measured, neither far from `rows`."""
        sizes = [size for size in self._plain_seen if _alike(size, rows, _FAR)]
        return bool(sizes) and min(sizes) <= rows <= max(sizes)

    def _see_plain(self, rows: int) -> None:
        self._step += 1
        seen = self._plain_seen.setdefault(rows, [0, 0])
        seen[:] = seen[0] + 1, self._step
        for size in self._unchecked:
            if _alike(size, rows):
                self._unchecked[size] = 0


def _alike(size: int, rows: int, near: float = _NEAR) -> bool:
    """Whether `size` and `rows` are within the ratio `near`."""
    return size <= rows * near and rows <= size * near


_NOTHING, _NEVER = Surcharge(), (0, 0)


def load_of(rows: int) -> int:
    """The load of `rows` sequences: 0 for 1, 1 for 2, 2 for 3 and 4, 3 for 5..8, ..."""
    return (rows - 1).bit_length()
