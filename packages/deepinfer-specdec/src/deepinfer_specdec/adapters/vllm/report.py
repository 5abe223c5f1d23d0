"""Statistics of adaptive verification: a line in the log, and numbers for whoever asks."""

from __future__ import annotations

import logging
import time

import numpy as np
from numpy.typing import NDArray

from deepinfer_specdec.statistics import SpeculationStatistics

logger = logging.getLogger("vllm.deepinfer_specdec")


class Report:
    """Counts since the start. vLLM's own counters know how many drafts were scheduled, not how many were verified.

    Args:
        log_every: seconds between two lines; 0 for none.
    """

    def __init__(self, log_every: float) -> None:
        self.statistics = SpeculationStatistics()
        self.steps = 0
        self.scheduled = 0
        self.budget = 0
        self.stock_budget = 0
        self.ran = 0
        self.drafted = 0
        self.pauses = 0
        self._temperatures: list[float] = []
        self._priced = 0
        self._log_every = log_every
        self._logged = time.monotonic()

    def planned(self, scheduled: int, budget: int, stock_budget: int) -> None:
        """Count a plan: drafts there were, our budget and the one that vLLM would have taken."""
        self.steps += 1
        self.scheduled += scheduled
        self.budget += budget
        self.stock_budget += stock_budget

    def drafting(self, ran: int, drafted: int, changes: int) -> None:
        """Remember how many steps ran, in how many of them the drafter did, and how often it stopped or went on."""
        self.ran, self.drafted, self.pauses = ran, drafted, (changes + 1) // 2

    def verified(self, outcome: NDArray[np.float32]) -> None:
        """Count the rows (confidences, verified, accepted) [R, K + 2] of one step."""
        width = outcome.shape[1] - 2
        verified, accepted = outcome[:, width].astype(np.int64), outcome[:, width + 1].astype(np.int64)
        self.statistics.record(np.full(len(outcome), width), verified, accepted)

    def log(self, temperatures: list[float], priced: int) -> None:
        """Remember what was learned, and write a line when it is time for one."""
        self._temperatures, self._priced = temperatures, priced
        if not self._log_every or time.monotonic() - self._logged < self._log_every or not self.steps:
            return
        self._logged = time.monotonic()
        logger.info("%s", self)

    def __str__(self) -> str:
        counted = self.statistics
        length, rate = counted.accepted_length, counted.acceptance_rate
        kept = "off, nothing verified" if length is None else f"{length:.2f} tokens a verification step"
        return (
            f"DeepInfer speculation: {kept}; "
            f"{self.budget} of {self.scheduled} drafts verified in {self.steps} steps "
            f"(vLLM's own budgets: {self.stock_budget}), {100 * (rate or 0.0):.0f} % of them accepted; "
            f"drafts made in {self.drafted} of {self.ran} steps ({self.pauses} pauses); "
            f"temperatures {' '.join(f'{value:.2f}' for value in self._temperatures)}; {self._priced} steps priced"
        )

    def as_dict(self) -> dict[str, object]:
        """For `collective_rpc` and tests."""
        return {
            "steps": self.steps,
            "scheduled_drafts": self.scheduled,
            "budget": self.budget,
            "vllm_budget": self.stock_budget,
            "steps_run": self.ran,
            "steps_drafted": self.drafted,
            "drafting_pauses": self.pauses,
            "temperatures": [round(value, 4) for value in self._temperatures],
            "priced_steps": self._priced,
            **self.statistics.as_dict(),
        }
