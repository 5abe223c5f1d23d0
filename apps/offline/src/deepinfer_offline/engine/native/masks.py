"""Grammar masks of a step, filled beside the forward from the moment the tokens before are known to the matchers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from deepinfer_offline.engine.native.answer import Answer

if TYPE_CHECKING:
    from deepinfer_sched import StepPlan

    from deepinfer_offline.engine.native.batch import SampleRows

_MOST_THREADS = 8


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The masks of one row of a plan: one for its next token and one after each of its drafts.

    Attributes:
        row: of the plan.
        seq_id, matcher: whose they are.
        drafts: ids that the row verifies.
        first: place of its first mask.
    """

    row: int
    seq_id: int
    matcher: Any
    drafts: Sequence[int]
    first: int


class MaskMaker:
    """Fills the masks of the constrained draws of each step in a thread of its own.

    The forward of a step never waits for a grammar. Its masks are begun when the loop has applied every earlier step, and
    until this step's own tokens are applied no matcher changes: filling and forward run side by side.

    Args:
        answers: live answers by sequence id, shared with the loop.
        vocab_size: width of the logits.
    """

    def __init__(self, answers: Mapping[int, Answer], vocab_size: int) -> None:
        self._answers = answers
        self._words = -(-vocab_size // 32)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="deepinfer-masks")
        # One core is left to the forward on small machines: it waits for the slowest of its threads.
        self._threads = min(_MOST_THREADS, max(1, (os.cpu_count() or 1) // 2))
        self.errors: dict[int, Exception] = {}  # sequence id -> what its matcher raised
        self.reach: dict[
            int, int
        ] = {}  # sequence id -> masks that its row has, where they do not follow all its drafts

    def step(self, plan: StepPlan) -> StepMasks:
        """The masks of a planned step, to be opened by the loop and asked for by the runner."""
        return StepMasks(self, plan)

    def begin(self, plan: StepPlan) -> Future[tuple[np.ndarray, np.ndarray]]:
        """Start filling. Called by the loop's thread when the matchers stand where the step's tokens come next."""
        wanted = self._wanted(plan)
        return self._thread.submit(self._fill, plan.num_rows, wanted)

    def close(self) -> None:
        """Stop the thread, after what it was given."""
        self._thread.shutdown()

    def _wanted(self, plan: StepPlan) -> list[_Wanted]:
        """Rows of sequences that are still alive."""
        found: list[_Wanted] = []
        first = 0
        for row in np.flatnonzero(plan.constrained & plan.samples).tolist():
            seq_id = int(plan.seq_ids[row])
            answer = self._answers.get(seq_id)
            self.reach.pop(seq_id, None)
            if answer is not None and answer.matcher is not None:
                drafts = answer.drafts[: int(plan.drafts[row])]
                found.append(_Wanted(row, seq_id, answer.matcher, drafts, first))
                first += 1 + len(drafts)
        return found

    def _fill(self, rows: int, wanted: list[_Wanted]) -> tuple[np.ndarray, np.ndarray]:
        """(int64 [rows] place of each plan row's first mask, -1 for none; int32 [masks, words])."""
        first = np.full(rows, -1, np.int64)
        first[[w.row for w in wanted]] = [w.first for w in wanted]
        count = sum(1 + len(w.drafts) for w in wanted)
        masks = np.full((count, self._words), -1, np.int32)
        self._fill_together([w for w in wanted if not w.drafts], masks)
        for one in wanted:
            if one.drafts:
                self._fill_alone(one, masks)
        return first, masks

    def _fill_together(self, wanted: list[_Wanted], masks: np.ndarray) -> None:
        """All rows at once on the grammar library's threads; one by one if that fails, to find whose fault it is."""
        from deepinfer_structured import fill_masks

        try:
            fill_masks([w.matcher for w in wanted], [w.first for w in wanted], masks, self._threads)
        except Exception:
            for one in wanted:
                self._fill_alone(one, masks)

    def _fill_alone(self, one: _Wanted, masks: np.ndarray) -> None:
        rows = masks[one.first : one.first + 1 + len(one.drafts)]
        rows[:] = -1
        try:
            if one.drafts:
                allowed = one.matcher.fill_draft_masks(one.drafts, rows)
                if allowed < len(one.drafts):
                    self.reach[one.seq_id] = allowed + 1
            else:
                one.matcher.fill_mask(rows[0])
        except Exception as error:
            self.errors[one.seq_id] = error
            rows[:] = -1


class StepMasks:
    """The masks of one step. The loop opens them, the step's thread waits for them.

    Args:
        maker: fills them.
        plan: the step.
    """

    def __init__(self, maker: MaskMaker, plan: StepPlan) -> None:
        self._maker, self._plan = maker, plan
        self.needed = bool((plan.constrained & plan.samples).any())
        self._filling: Future[Future[tuple[np.ndarray, np.ndarray]]] = Future()

    def open(self) -> None:
        """Every earlier step is applied: begin to fill. Further calls change nothing."""
        if self.needed and not self._filling.done():
            self._filling.set_result(self._maker.begin(self._plan))

    def __call__(self, samples: SampleRows) -> tuple[np.ndarray, np.ndarray] | None:
        """Wait for the masks, and put them in the order of the draws: the runner's `MaskSource`."""
        first, masks = self._filling.result().result()
        starts = first[samples.plan_rows]
        draws = np.flatnonzero(starts >= 0)
        if not len(draws):
            return None
        rows = samples.plan_rows[draws]
        begins = np.flatnonzero(np.r_[True, rows[1:] != rows[:-1]])  # the draws of a row stand together
        nth = np.arange(len(draws)) - np.repeat(begins, np.diff(np.r_[begins, len(draws)]))
        return draws, masks[starts[draws] + nth]
