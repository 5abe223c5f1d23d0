"""Counters of speculation, with one definition: accepted length = tokens emitted per verification step, bonus included."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class SpeculationStatistics:
    """Counts over a run. A verification step is one sequence's row in one step, whether its draft was trimmed to 0 or
    not.

    Attributes:
        rows: verification steps.
        emitted: tokens they emitted.
        drafted: drafts that the drafter made.
        verified: drafts that the target computed.
        accepted: drafts that were emitted.
        verified_at: verified drafts by column.
        accepted_at: accepted drafts by column.
    """

    rows: int = 0
    emitted: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    verified_at: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    accepted_at: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @property
    def accepted_length(self) -> float:
        """Tokens emitted per verification step, the bonus included; 1 when nothing ran."""
        return self.emitted / self.rows if self.rows else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of verified drafts; 0 when none was verified."""
        return self.accepted / self.verified if self.verified else 0.0

    def record(
        self, drafted: NDArray[np.integer], verified: NDArray[np.integer], accepted: NDArray[np.integer]
    ) -> None:
        """Count one step: int [R] each, drafts made, verified and accepted per row."""
        self.rows += len(verified)
        self.drafted += int(drafted.sum())
        self.verified += int(verified.sum())
        self.accepted += int(accepted.sum())
        self.emitted += int(accepted.sum()) + len(accepted)
        top = int(verified.max(initial=0))
        if top > self.verified_at.size:
            grow = top - self.verified_at.size
            self.verified_at = np.pad(self.verified_at, (0, grow))
            self.accepted_at = np.pad(self.accepted_at, (0, grow))
        columns = np.arange(self.verified_at.size)
        self.verified_at += (np.asarray(verified)[:, None] > columns).sum(axis=0)
        self.accepted_at += (np.asarray(accepted)[:, None] > columns).sum(axis=0)

    def as_dict(self) -> dict[str, object]:
        """For reports."""
        return {
            "accepted_length": round(self.accepted_length, 4),
            "acceptance_rate": round(self.acceptance_rate, 4),
            "verification_steps": self.rows,
            "emitted_tokens": self.emitted,
            "drafted_tokens": self.drafted,
            "verified_tokens": self.verified,
            "accepted_tokens": self.accepted,
            "accepted_share_by_position": [
                round(float(a / v), 4) if v else None for a, v in zip(self.accepted_at, self.verified_at, strict=True)
            ],
        }
