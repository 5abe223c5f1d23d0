"""What a step costs: vLLM's profile of this machine, kept jagged and corrected by the steps that really ran."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from deepinfer_specdec.scheduling.cost import CostCurve

Points = Sequence[tuple[int, float]]  # (size, milliseconds), as vLLM's profile has them

_WINDOW = 31  # steps kept per point
_ENOUGH = 3  # steps from which a point is believed
_MOST_ADDED = 2.0  # by drafting, times its profile
_LEAST = 0.25  # of a step's time, that is not drafting's: the one ratio may be true of steps of other sizes only
_FEW = 7  # last steps without drafts that one with them is compared with
_LONG_AGO = 64  # steps after which they are not: contexts grow


class _Lap(NamedTuple):
    """A step, in milliseconds: what it took, and the profile of its drafting (0 for none) and of its verification."""

    took: float
    drafting: float
    profiled: float

    def verified(self, added: float) -> float:
        """What is left for verification where drafting adds so many times its profile."""
        return max(self.took - added * self.drafting, _LEAST * self.took)


class _Recent:
    """The last steps of one size that did not draft."""

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=_FEW)
        self._last = 0

    def add(self, lap: _Lap, now: int) -> None:
        if now - self._last > _LONG_AGO:
            self._ratios.clear()
        self._ratios.append(lap.took / lap.profiled)
        self._last = now

    def known(self, now: int) -> bool:
        return len(self._ratios) >= _ENOUGH and now - self._last <= _LONG_AGO

    @property
    def ratio(self) -> float:
        """Of what they took to their profile."""
        return float(np.median(self._ratios))


class StepPrices:
    """Milliseconds of a step: verify(tokens), and draft(requests) if it drafts.

    vLLM times the forward pass alone, at one context length, and makes the curve monotone. A real step also pays for the
    LM head on every verified row, for sampling and for the gap before it, at the contexts of the day. So each profiled
    point carries a ratio, the median of measured over profiled times; points that no step has visited yet take the
    ratio of their neighbours, and one lucky visit cannot make a point look cheap against unvisited ones.

    What vLLM times as drafting also keeps the drafter's context, which a step without drafts must do as well, by other
    kernels. What drafting adds is known where a step drafts among steps of its size that do not: one ratio corrects the whole
    profile of drafting.

    Args:
        draft: (requests, milliseconds) of the drafter.
        verify: (tokens, milliseconds) of the target.
        padded_to: largest size that runs in a padded graph; 0, or a size that `verify` does not have, when nothing is padded.
    """

    def __init__(self, draft: Points, verify: Points, padded_to: int) -> None:
        self._draft_points = list(draft)
        self._base = dict(verify)
        self._padded_to = padded_to if padded_to in self._base else 0
        self._laps: dict[int, deque[_Lap]] = {}
        self._without: dict[int, _Recent] = {}
        self._added: deque[float] = deque(maxlen=_WINDOW)  # by drafting, relative to its profile
        self.observed = 0
        self.update(self._draft_points, list(self._base.items()))
        self._profiled, self._drafting = self.verify, self.draft

    def update(self, draft: Points, verify: Points) -> None:
        """Price by these points from now on."""
        self.draft = _curve(draft, max(size for size, _ in draft))
        sizes = [size for size, _ in verify]
        self.verify = _curve(verify, self._padded_to if self._padded_to in sizes else 0)

    def observe(self, requests: int, tokens: int, milliseconds: float, drafted: bool = True) -> None:
        """Take in a step that verified `tokens` for `requests`, and drafted for them or not. Does not change a price yet."""
        drafting = float(self._drafting.seconds(requests)) if drafted else 0.0
        profiled = float(self._profiled.seconds(tokens))
        if tokens < 1 or not drafting < milliseconds < np.inf or profiled <= 0.0:
            return
        self.observed += 1
        point, lap = self._point(tokens), _Lap(milliseconds, drafting, profiled)
        self._laps.setdefault(point, deque(maxlen=_WINDOW)).append(lap)
        recent = self._without.setdefault(point, _Recent())
        if not drafted:
            recent.add(lap, self.observed)
        elif recent.known(self.observed):
            self._added.append((milliseconds - recent.ratio * profiled) / drafting)

    def refreshed(self) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
        """The (draft, verify) points as the observed steps correct them. Changes nothing."""
        added = float(np.clip(np.median(self._added), 0.0, _MOST_ADDED)) if len(self._added) >= _ENOUGH else 1.0
        draft = [(size, cost * added) for size, cost in self._draft_points]
        seen = {
            point: float(np.median([lap.verified(added) / lap.profiled for lap in laps]))
            for point, laps in sorted(self._laps.items())
            if len(laps) >= _ENOUGH
        }
        if not seen:
            return draft, list(self._base.items())
        sizes = np.array(list(self._base))
        ratios = np.interp(np.log(sizes), np.log(list(seen)), list(seen.values()))
        return draft, [(int(s), self._base[int(s)] * float(r)) for s, r in zip(sizes, ratios, strict=True)]

    def _point(self, tokens: int) -> int:
        """The profiled point that stands for a step of `tokens`: its graph, or the nearest one where nothing is padded."""
        sizes = np.array(list(self._base))
        if tokens <= self._padded_to:
            return int(sizes[np.searchsorted(sizes, tokens)])
        free = sizes[sizes > self._padded_to] if (sizes > self._padded_to).any() else sizes
        return int(free[np.abs(np.log(free / tokens)).argmin()])


def _curve(points: Points, padded_to: int) -> CostCurve:
    ordered = sorted((size, max(cost, 1e-6)) for size, cost in points if size > 0)
    return CostCurve([size for size, _ in ordered], [cost for _, cost in ordered], padded_to)
