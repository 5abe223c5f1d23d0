"""Verifying drafts that the host has not seen: a step is planned while the one whose tokens it follows still runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from deepinfer_sched.errors import SchedError

BudgetFn = Callable[[int, np.ndarray, np.ndarray, int], int]
"""Number of the step, slots int32 [R] of its decode rows, int32 [R], the drafts that each may verify at most, and the drafts that
the step's tokens have room for -> drafts that all of them verify together."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """What a step verifies and drafts where that is shared out on the device.

    Which decode row verifies how many drafts is decided when the step runs.

    Attributes:
        budget: drafts that the decode rows verify together; `StepPlan.drafts` says how many each may have at most.
        width: drafts made for each row that samples.
    """

    budget: int
    width: int


@dataclass(frozen=True, slots=True)
class DraftsAhead:
    """How to plan a step whose drafts are made and shared out on the device.

    Attributes:
        width: drafts that the step makes for every row that samples; the row's next step may verify them. 0 for none.
        budget: how many the step verifies; no more than it has room for.
    """

    width: int
    budget: BudgetFn

    def share(self, step: int, slots: np.ndarray, most: np.ndarray, room: int) -> Ahead:
        """The numbers of a step, for a plan.

        Args:
            step, slots, most, room: see `BudgetFn`, which is not asked for a step without decode rows.

        Raises:
            SchedError: a budget that the rows cannot verify.
        """
        budget = self.budget(step, slots, most, room) if len(slots) else 0
        if not 0 <= budget <= most.sum():
            raise SchedError(f"step {step}: a budget of {budget} drafts; its rows may verify 0 to {most.sum()}")
        return Ahead(min(budget, room), self.width)
