"""How many drafts a step verifies, planned before the drafts are there: for loops that run ahead of the device."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deepinfer_specdec.errors import SpecDecodeError
from deepinfer_specdec.scheduling.budget import best_budget, expected_tokens
from deepinfer_specdec.scheduling.relay import SurvivalRelay


class VerificationPlanner:
    """Budgets for a drafter with a confidence head under an asynchronous loop. The native engine, the vLLM adapter and the
    simulator all plan with it.

    In step s an engine verifies the blocks that step s - 1 drafted. `budget` is asked for s while s - 1 runs, and looks at
    blocks of step s - `lag` and before. Which drafts the budget goes to is left to the blocks' own confidences (`admit`, or
    its like on the device), whose rank never sees the token that it ranks: so the output distribution is the target's
    (specdec page, A.4; `tests/test_exactness.py`). `record` brings a block's confidences whenever they reach the host.

    Args:
        slots: rows that can run at once.
        width: draft length.
        edge: share by which a budget above 0 must beat none: forecasts err, and plain decoding is the safe choice.
        lag: see `SurvivalRelay`.
    """

    def __init__(self, slots: int, width: int, edge: float = 0.0, lag: int = 2) -> None:
        if not edge >= 0.0:
            raise SpecDecodeError(f"edge {edge}; allowed: >= 0")
        self._relay = SurvivalRelay(slots, width, lag)
        self._width = width
        self._edge = edge

    def begin(self, slot: int, step: int = 0) -> None:
        """A new sequence takes the slot; blocks drafted before `step` are the former one's, even if they are recorded later."""
        self._relay.reset(slot, step)

    def record(self, step: int, slots: NDArray[np.integer], survivals: NDArray[np.floating]) -> None:
        """Take in calibrated survivals [R, K] of the blocks drafted for `slots` [R] in `step`."""
        self._relay.record(step, slots, survivals)

    def expected(
        self, step: int, slots: NDArray[np.integer], counts: NDArray[np.integer] | None = None
    ) -> NDArray[np.float64]:
        """float64 [n + 1]: drafts that are expected to hold when the best 0..n of `slots` [R] are verified in `step`.

        Args:
            step, slots: see above.
            counts: [R], drafts that each has; None for all columns.
        """
        survivals = self._relay.forecast(step, slots)
        if counts is not None:
            survivals *= np.arange(self._width) < counts[:, None]
        return expected_tokens(survivals)

    def budget(
        self,
        step: int,
        slots: NDArray[np.integer],
        seconds: NDArray[np.float64],
        rows: int | None = None,
        counts: NDArray[np.integer] | None = None,
    ) -> int:
        """Drafts to verify in `step` over `slots` [R]: the most expected tokens per second of all budgets.

        Args:
            step: that verifies.
            slots: sequences with drafts.
            seconds: float64 [m + 1], of the step with 0..m drafts, drafting included; m is the most that fit.
            rows: sequences that the step samples for, those without drafts included; None for R.
            counts: [R], drafts that each slot has; None for all columns.
        """
        if not slots.size:
            return 0
        tokens = self.expected(step, slots, counts)
        return best_budget(tokens, slots.size if rows is None else rows, seconds, self._edge)
