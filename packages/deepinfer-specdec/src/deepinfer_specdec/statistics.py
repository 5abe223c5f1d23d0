"""Counters of speculation, with one definition: accepted length = tokens emitted per verification step, bonus included."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class SpeculationStatistics:
    """Counts over a run. A verification step is one sequence's row in one step that verified at least one draft. A row that
    verified none, because none was made or all were trimmed, is plain decoding and counted apart.

    Attributes:
        verifications: verification steps.
        emitted: tokens they emitted, the bonus or correction included.
        plain_rows: rows that verified nothing while speculation was on; each emits one token.
        drafted: drafts that the drafter made, also for rows that verified none.
        verified: drafts that the target computed.
        accepted: drafts that were emitted.
        verified_at: verified drafts by column.
        accepted_at: accepted drafts by column.
    """

    verifications: int = 0
    emitted: int = 0
    plain_rows: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    verified_at: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    accepted_at: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @property
    def accepted_length(self) -> float | None:
        """Tokens emitted per verification step, the bonus included; None where nothing was verified: speculation was off."""
        return self.emitted / self.verifications if self.verifications else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted share of verified drafts; None where none was verified."""
        return self.accepted / self.verified if self.verified else None

    def record(
        self, drafted: NDArray[np.integer], verified: NDArray[np.integer], accepted: NDArray[np.integer]
    ) -> None:
        """Count one step: int [R] each, drafts made, verified and accepted per row."""
        steps = int((np.asarray(verified) > 0).sum())
        self.verifications += steps
        self.plain_rows += len(verified) - steps
        self.drafted += int(drafted.sum())
        self.verified += int(verified.sum())
        self.accepted += int(accepted.sum())
        self.emitted += int(accepted.sum()) + steps
        top = int(verified.max(initial=0))
        if top > self.verified_at.size:
            grow = top - self.verified_at.size
            self.verified_at = np.pad(self.verified_at, (0, grow))
            self.accepted_at = np.pad(self.accepted_at, (0, grow))
        self.verified_at += _at_least(verified, self.verified_at.size)
        self.accepted_at += _at_least(accepted, self.accepted_at.size)

    def as_dict(self) -> dict[str, object]:
        """For reports; None stands where nothing was verified."""
        return {
            "accepted_length": _rounded(self.accepted_length),
            "acceptance_rate": _rounded(self.acceptance_rate),
            "verification_steps": self.verifications,
            "emitted_tokens": self.emitted,
            "plain_rows": self.plain_rows,
            "drafted_tokens": self.drafted,
            "verified_tokens": self.verified,
            "accepted_tokens": self.accepted,
            "accepted_share_by_position": [
                round(float(a / v), 4) if v else None for a, v in zip(self.accepted_at, self.verified_at, strict=True)
            ],
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _at_least(counts: NDArray[np.integer], columns: int) -> NDArray[np.int64]:
    """int64 [columns]: how many of `counts` are more than 0, 1, ..."""
    return np.bincount(counts, minlength=columns + 1)[:0:-1].cumsum()[::-1]
