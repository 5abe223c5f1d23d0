"""What a step costs: vLLM's profile of this machine, kept jagged and corrected by the steps that really ran."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from deepinfer_specdec.scheduling.cost import CostCurve

Points = Sequence[tuple[int, float]]  # (size, milliseconds), as vLLM's profile has them

_WINDOW = 31  # steps kept per point
_ENOUGH = 3  # steps from which a point is believed


class StepPrices:
    """Milliseconds of a step: draft(requests) + verify(tokens).

    vLLM times the forward pass alone, at one context length, and makes the curve monotone. A real step also pays for the
    LM head on every verified row, for sampling and for the gap before it, at the contexts of the day. So each profiled
    point carries a ratio, the median of measured over profiled times; points that no step has visited yet take the
    ratio of their neighbours, and one lucky visit cannot make a point look cheap against unvisited ones.

    Args:
        draft: (requests, milliseconds) of the drafter.
        verify: (tokens, milliseconds) of the target.
        padded_to: largest size that runs in a padded graph; 0 when nothing is padded.
    """

    def __init__(self, draft: Points, verify: Points, padded_to: int) -> None:
        self._draft_points = list(draft)
        self._base = dict(verify)
        self._padded_to = padded_to
        self._ratios: dict[int, deque[float]] = {}
        self.observed = 0
        self.update(self._draft_points, list(self._base.items()))
        self._profiled = self.verify

    def update(self, draft: Points, verify: Points) -> None:
        """Price by these points from now on."""
        self.draft = _curve(draft, max(size for size, _ in draft))
        sizes = [size for size, _ in verify]
        self.verify = _curve(verify, self._padded_to if self._padded_to in sizes else 0)

    def observe(self, requests: int, tokens: int, milliseconds: float) -> None:
        """Take in a step that verified `tokens` for `requests` and then drafted for them. Does not change a price yet."""
        verify = milliseconds - float(self.draft.seconds(requests))
        profiled = float(self._profiled.seconds(tokens))
        if tokens < 1 or not 0.0 < verify < np.inf or profiled <= 0.0:
            return
        self._ratios.setdefault(self._point(tokens), deque(maxlen=_WINDOW)).append(verify / profiled)
        self.observed += 1

    def refreshed(self) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
        """The (draft, verify) points as the observed steps correct them. Changes nothing."""
        seen = {size: float(np.median(r)) for size, r in sorted(self._ratios.items()) if len(r) >= _ENOUGH}
        if not seen:
            return self._draft_points, list(self._base.items())
        sizes = np.array(list(self._base))
        ratios = np.interp(np.log(sizes), np.log(list(seen)), list(seen.values()))
        return self._draft_points, [(int(s), self._base[int(s)] * float(r)) for s, r in zip(sizes, ratios, strict=True)]

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
