"""What is left to do of a job."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer_offline.job.journal import Journal
from deepinfer_offline.job.scan import JobIndex


@dataclass(frozen=True, slots=True)
class Work:
    """What is left to do.

    Attributes:
        todo: bool [records], what the engine has to answer.
        lines: int64 [records], how many lines of OUTPUT each answer makes: its own and those that copy it.
        done: lines of OUTPUT that are settled already.
    """

    todo: NDArray[np.bool_]
    lines: NDArray[np.int64]
    done: int

    @classmethod
    def of(cls, index: JobIndex, journal: Journal) -> Work:
        """Compare the job with its journal."""
        answered = journal.answered()
        copies = (index.same_answer >= 0) & ~answered
        todo = ~answered & ~copies
        lines = 1 + np.bincount(index.same_answer[copies], minlength=len(index))
        return cls(todo, lines, len(index) - int(lines[todo].sum()))
