"""Grammar masks of a step, made in the step's thread once the tokens before are known to the matchers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from deepinfer_offline.engine.native.answer import Answer

if TYPE_CHECKING:
    from deepinfer_sched import StepPlan

    from deepinfer_offline.engine.native.batch import SampleRows


class MaskMaker:
    """Fills the masks of the constrained draws of a step.

    The forward of a step never waits for a grammar. Its draws wait at the gate, which opens when the loop has applied
    every earlier step; from then until this step's own tokens are applied, no matcher changes.

    Args:
        answers: live answers by sequence id, shared with the loop.
        vocab_size: width of the logits.
    """

    def __init__(self, answers: Mapping[int, Answer], vocab_size: int) -> None:
        self._answers = answers
        self._words = -(-vocab_size // 32)
        self.errors: dict[int, Exception] = {}  # sequence id -> what its matcher raised

    def source(self, plan: StepPlan, gate: threading.Event) -> Callable[[SampleRows], Any] | None:
        """The callable that the runner calls with the draws of the step; None if no row is constrained."""
        if not (plan.constrained & plan.samples).any():
            return None

        def masks(samples: SampleRows) -> tuple[np.ndarray, np.ndarray] | None:
            gate.wait()
            return self._fill(plan, samples)

        return masks

    def _fill(self, plan: StepPlan, samples: SampleRows) -> tuple[np.ndarray, np.ndarray] | None:
        """Masks of the constrained draws of sequences that are still alive."""
        draws, owners, matchers = [], [], []
        for draw in np.flatnonzero(plan.constrained[samples.plan_rows]).tolist():
            seq_id = int(plan.seq_ids[samples.plan_rows[draw]])
            answer = self._answers.get(seq_id)
            if answer is not None and answer.matcher is not None:
                draws.append(draw)
                owners.append(seq_id)
                matchers.append(answer.matcher)
        if not draws:
            return None
        masks = np.full((len(draws), self._words), -1, np.int32)
        self._fill_rows(matchers, owners, masks)
        return np.array(draws, np.int64), masks

    def _fill_rows(self, matchers: list[Any], owners: list[int], masks: np.ndarray) -> None:
        """All rows at once on the grammar library's threads; one by one if that fails, to find whose fault it is."""
        try:
            from deepinfer_structured import fill_masks

            fill_masks(matchers, range(len(matchers)), masks)
            return
        except Exception:
            masks[:] = -1
        for row, (matcher, seq_id) in enumerate(zip(matchers, owners, strict=True)):
            try:
                matcher.fill_mask(masks[row])
            except Exception as error:
                self.errors[seq_id] = error
                masks[row] = -1
