"""The budget of a step from blocks that are old enough: what this package's planner does with vLLM's batches."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deepinfer_specdec.adapters.vllm.pricing import StepPrices
from deepinfer_specdec.scheduling.budget import StepLoad, expected_budget, expected_tokens
from deepinfer_specdec.scheduling.relay import SurvivalRelay

_HALF_LIFE = 16.0  # steps, as in `PlannerOptions`


class BudgetPlanner:
    """Chooses how many drafts vLLM verifies in a step: global argmax of expected tokens per second.

    A block is stamped with the step at whose end vLLM drafted it, and is verified in the next one. A plan for step s
    looks at stamps up to s - 2, so the block that is verified in s has no part in its own budget (specdec page, A.4).

    Args:
        slots: requests that can run at once.
        width: drafts a request.
        edge: share by which verifying drafts must beat plain decoding.
    """

    def __init__(self, slots: int, width: int, edge: float = 0.0) -> None:
        self._relay = SurvivalRelay(slots, width)
        self._width = width
        self._edge = edge
        self._born = np.zeros(slots, dtype=np.int64)  # the step in which a slot's request arrived

    def begin(self, slot: int, step: int) -> None:
        """A new request takes the slot in `step`."""
        self._relay.reset(slot)
        self._born[slot] = step

    def record(self, step: int, slots: NDArray[np.integer], confidences: NDArray[np.floating]) -> None:
        """Take in calibrated confidences [R, K] of the blocks drafted for `slots` in `step`.

        They may arrive late: slots that another request took meanwhile are left out.
        """
        same = self._born[slots] <= step
        if same.any():
            self._relay.record(step, slots[same], np.cumprod(confidences[same], axis=1))

    def budget(self, step: int, slots: NDArray[np.integer], counts: NDArray[np.integer], load: StepLoad,
               prices: StepPrices) -> int:  # fmt: skip
        """Drafts to verify in `step` over the requests in `slots` [R], which have `counts` [R] drafts each, 1..K."""
        forecast = self._relay.forecast(step, slots, _HALF_LIFE)
        rows = slots.shape[0]
        exists = np.arange(self._width) < counts[:, None]
        weights = forecast.weights.reshape(rows, -1, self._width) * exists[:, None]
        tokens = expected_tokens(forecast.survivals, weights)
        return expected_budget(tokens, load, prices.verify, self._edge)
