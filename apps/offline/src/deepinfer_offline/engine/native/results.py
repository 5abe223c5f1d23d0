"""What a step gave, on the host or on its way there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from deepinfer_sched import StepPlan

from deepinfer_offline.ops.transfers import Download
from deepinfer_offline.sampling.batch import Logprobs


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of prompt tokens `first + 1 ..` of one slot (`values.rows` counts from 0)."""

    slot: int
    first: int
    values: Logprobs


@dataclass(frozen=True, slots=True)
class DraftedRows:
    """Blocks that a step drafted behind the tokens it emitted.

    Attributes:
        plan_rows: int64 [D], whose they are.
        token_ids: int64 [D, K].
        confidence: float32 [D, K], raw.
    """

    plan_rows: np.ndarray
    token_ids: np.ndarray
    confidence: np.ndarray


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step drew. All arrays are on the host.

    Attributes:
        plan: the step.
        token_ids: int32 [R, k] by plan row, left-aligned: accepted drafts, then the token drawn after them.
        num_tokens: int32 [R], how many count; 0 where nothing was drawn.
        logprobs: of the draws that count and asked for them, or None. `logprobs.rows` indexes `draw_rows`.
        draw_rows: int64 [n], plan row of each draw, ascending positions within a row.
        prompts: log-probabilities of prompt tokens.
        seconds: of the step on its device, see `StepClock`.
        verified: int32 [R], drafts that each row verified.
        drafted: blocks for the next step, where the step made any.
        first: kernels may have been built or graphs captured for it, so what it took says nothing about others like it.
    """

    plan: StepPlan
    token_ids: np.ndarray
    num_tokens: np.ndarray
    logprobs: Logprobs | None
    draw_rows: np.ndarray
    prompts: tuple[PromptLogprobs, ...]
    seconds: float
    verified: np.ndarray
    drafted: DraftedRows | None = None
    first: bool = False


_TENSORS = ("chosen", "ranks", "top_ids", "top_values")


class LogprobsDownload:
    """Log-probabilities on their way to the host."""

    def __init__(self, found: Logprobs | None) -> None:
        self._found = found
        self._copies = Download([] if found is None else [getattr(found, name) for name in _TENSORS])

    def wait(self) -> Logprobs | None:
        """The log-probabilities on the host."""
        if self._found is None:
            return None
        chosen, ranks, top_ids, top_values = self._copies.wait()
        return Logprobs(self._found.rows, chosen, ranks, top_ids, top_values)
