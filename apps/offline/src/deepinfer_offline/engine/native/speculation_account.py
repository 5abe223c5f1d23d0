"""What speculation did in a run, for the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from deepinfer_specdec import SpeculationStatistics

_UNCOUNTED = 256  # steps counted at once


class SpeculationAccount:
    """Counts of steps and drafts. Called by the loop's thread only.

    Attributes:
        steps: with decode rows, by whether speculation was on.
        best_gain: highest expected gain so far, while off; 0 before any forecast.
    """

    def __init__(self) -> None:
        self.steps = {False: 0, True: 0}
        self.best_gain = 0.0
        self._statistics = SpeculationStatistics()
        self._uncounted: list[tuple[Sequence[int] | np.ndarray, ...]] = []  # drafts made, verified and accepted

    @property
    def statistics(self) -> SpeculationStatistics:
        """Counts so far."""
        made, self._uncounted = self._uncounted, []
        if made:
            drafted, verified, accepted = zip(*made, strict=True)
            self._statistics.record(
                np.concatenate(drafted).astype(np.int64), np.concatenate(verified), np.concatenate(accepted)
            )
        return self._statistics

    def count(self, drafted: Sequence[int] | np.ndarray, verified: np.ndarray, accepted: np.ndarray) -> None:
        """A step that was on: drafts made, verified and accepted, [R] each."""
        self._uncounted.append((drafted, verified, accepted))
        if len(self._uncounted) >= _UNCOUNTED:
            _ = self.statistics

    def report(self) -> dict[str, Any]:
        """The counts, how often it was on, and why never."""
        on, steps = self.steps[True], sum(self.steps.values())
        return {
            "outcome": self._outcome(),
            "on_share_of_steps": round(on / steps, 4) if steps else 0.0,
            **self.statistics.as_dict(),
        }

    def _outcome(self) -> str:
        on, steps = self.steps[True], sum(self.steps.values())
        if on:
            said = f"on in {on / steps:.0%} of the decode steps"
            return said if self.statistics.verifications else f"{said}, none of which verified a draft"
        if not self.best_gain:
            return "off: the job was too short to tell what drafts are worth"
        return f"off: at best x{self.best_gain:.2f} of plain decoding's speed was to be expected"
