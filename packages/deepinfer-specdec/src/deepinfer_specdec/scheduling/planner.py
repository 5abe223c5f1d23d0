"""The plan of a step: which rows draft, and how many drafts are verified, chosen together from earlier blocks and two
cost curves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer_specdec.draft import Draft
from deepinfer_specdec.errors import SpecDecodeError
from deepinfer_specdec.scheduling.admission import admit
from deepinfer_specdec.scheduling.cost import CostCurve
from deepinfer_specdec.scheduling.relay import Forecast, SurvivalRelay

_CHOICES = 6  # row counts tried besides none and all
_SELECTION_EDGE = 0.05  # fewer rows must promise this much more: levels are estimates, and left-out rows end later


@dataclass(frozen=True, slots=True)
class PlannerOptions:
    """How a `VerificationPlanner` decides.

    Attributes:
        lag: age in steps of the newest block that a budget may look at, >= 2.
        depth: blocks remembered per slot.
        edge: share by which speculation must beat plain decoding to be used, once for entering; a plan that speculated
            in the last step needs only to break even, so that noise around the break-even point does not switch it to
            and fro.
        half_life: steps after which a row that was not drafted is believed to be half way back to the average row.
        select_rows: leave rows out of drafting when their drafts would not pay for the drafter's time.
    """

    lag: int = 2
    depth: int = 16
    edge: float = 0.03
    half_life: float = 16.0
    select_rows: bool = True

    def __post_init__(self) -> None:
        if not self.edge >= 0.0:
            raise SpecDecodeError(f"edge {self.edge}; allowed: >= 0")
        if not self.half_life > 0.0:
            raise SpecDecodeError(f"half_life {self.half_life}; allowed: > 0 steps")


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the planner decided for R rows.

    Attributes:
        drafting: bool [R], rows to draft for.
        budget: drafts to verify over all rows.
        rate: expected tokens per second.
        plain_rate: the same without speculation.
    """

    drafting: NDArray[np.bool_]
    budget: int
    rate: float
    plain_rate: float


class VerificationPlanner:
    """Plans steps for a drafter with a confidence head under an asynchronous loop.

    Per step: `plan` (before the previous step ends), draft, `admit` (with the live confidences), verify. Everything in
        `plan` comes
    from blocks at least `lag` steps old, and `admit` ranks by survivals that never saw the token they rank, so the
    output distribution is the target's (specdec page, A.4; `tests/test_exactness.py`).

    Beyond the paper's production rule it averages several past blocks when rows are few, and drafts only for the rows
    that pay for it: trimming alone cannot win back the drafter's time.

    Args:
        slots: rows that can run at once.
        width: draft length.
        verify: seconds of a target step by its tokens.
        draft: seconds of a draft step by its rows.
    """

    def __init__(
        self, slots: int, width: int, verify: CostCurve, draft: CostCurve, options: PlannerOptions | None = None
    ) -> None:
        self.options = options or PlannerOptions()
        self.verify_curve = verify
        self.draft_curve = draft
        self._relay = SurvivalRelay(slots, width, self.options.depth, self.options.lag)
        self._width = width
        self._speculating = True
        self._chosen = 0  # rows drafted in the last step, 0 for all
        self._turn = 0

    def reset(self, slot: int) -> None:
        """A new sequence takes the slot."""
        self._relay.reset(slot)

    def plan(self, step: int, slots: NDArray[np.integer], other_tokens: int = 0, limit: int = 1 << 30) -> StepPlan:
        """Decide for the rows in `slots` (each emits a token), next to `other_tokens` of prefill, with at most `limit`
        drafts.
        """
        rows = slots.shape[0]
        base = rows + other_tokens
        plain = rows / float(self.verify_curve.seconds(base)) if rows else 0.0
        if not rows or limit < 1:
            return StepPlan(np.zeros(rows, dtype=bool), 0, plain, plain)
        forecast = self._relay.forecast(step, slots, self.options.half_life)
        order = _descending(forecast.survivals)
        flat = forecast.survivals.ravel()[order].astype(np.float64)
        spread = forecast.weights.ravel()[order].astype(np.float64)
        best = self._search(base, flat, spread, order, forecast, limit)
        threshold = plain * (1.0 if self._speculating else 1.0 + self.options.edge)
        self._speculating = best.rate > threshold and best.budget > 0
        return best if self._speculating else StepPlan(np.zeros(rows, dtype=bool), 0, plain, plain)

    def admit(self, step: int, slots: NDArray[np.integer], draft: Draft, budget: int) -> NDArray[np.int32]:
        """Lengths int32 [R] to verify of the blocks that `slots` drafted in `step`; remembers their survivals for later
        plans.
        """
        survivals = draft.survivals()
        self._relay.record(step, slots, survivals)
        return admit(survivals, draft.counts, budget)

    def _search(
        self, base: int, flat: NDArray, spread: NDArray, order: NDArray[np.integer], forecast: Forecast, limit: int
    ) -> StepPlan:
        """Best (rows drafted, budget): all rows, or those of highest level, when leaving the others out is clearly
        better.
        """
        rows, columns = forecast.survivals.shape
        rate, budget = self._best(rows, base, flat, spread, limit, rows)
        chosen = rows
        rank = np.zeros(rows, dtype=np.int64)
        if self.options.select_rows and rows > 1:
            ranks = _ranks(forecast.past_levels)[order // columns]
            for count in self._choices(rows):
                keep = ranks < count
                candidate = self._best(rows, base, flat[keep], spread[keep], limit, count)
                if candidate[0] > rate * (1.0 + _SELECTION_EDGE):
                    (rate, budget), chosen = candidate, count
            self._chosen = chosen
            rank = _ranks(forecast.levels)
        return StepPlan(rank < chosen, budget, rate, 0.0)

    def _choices(self, rows: int) -> list[int]:
        """Row counts to try in this step: the last choice and one other in turn, which keeps a step cheap."""
        points = self.draft_curve.sizes[self.draft_curve.sizes < rows].tolist()[-_CHOICES:]
        if not points:
            return []
        self._turn += 1
        return sorted({points[self._turn % len(points)], *(p for p in points if p == self._chosen)})

    def _best(
        self, rows: int, base: int, flat: NDArray, spread: NDArray, limit: int, drafted: int
    ) -> tuple[float, int]:
        """(rate, budget) of the best budget over drafts sorted by survival."""
        gained = np.cumsum(flat * spread)
        if (
            flat.size <= drafted * self._width and spread.size and spread.min() == 1.0
        ):  # one block a row: no need to interpolate
            most = min(limit, flat.size)
            tokens = np.empty(most + 1)
            tokens[1:] = gained[:most] + rows
        else:
            mass = np.cumsum(spread)
            most = min(limit, round(float(mass[-1])) if mass.size else 0)
            tokens = rows + np.interp(np.arange(most + 1), mass, gained)
        tokens[0] = rows
        seconds = self.verify_curve.span(base, most + 1) + float(self.draft_curve.seconds(drafted))
        rate = tokens / seconds
        budget = int(rate.argmax())
        return float(rate[budget]), budget


def _descending(values: NDArray[np.float32]) -> NDArray[np.int64]:
    """Order of non-negative `values` from the highest, equal ones by index. Several times faster than a stable argsort.

    Non-negative floats order as their bits do, so bits and index fit one integer key.
    """
    bits = np.ascontiguousarray(values, dtype=np.float32).ravel().view(np.uint32).astype(np.uint64)
    keys = (~bits << np.uint64(32)) | np.arange(bits.size, dtype=np.uint64)
    keys.sort()
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)


def _ranks(levels: NDArray[np.float32]) -> NDArray[np.int64]:
    """Place of every row by level, 0 for the highest; equal ones by row."""
    rank = np.empty(levels.size, dtype=np.int64)
    rank[_descending(levels)] = np.arange(levels.size)
    return rank
