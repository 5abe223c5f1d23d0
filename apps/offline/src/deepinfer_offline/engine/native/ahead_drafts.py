"""Which steps verify drafts ahead of the host, how many, and what is learned when their results come.

A step verifies the block that the step before drafts, so it is planned while that block is not there. How many drafts it
verifies is settled by blocks at least two steps old: the block that it verifies has no say. Which ones is settled on the
device, by the block's own confidences (`ahead_rows.share_drafts`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from deepinfer_sched import DraftsAhead
from deepinfer_specdec.scheduling.costs import StepCosts, ahead_costs
from deepinfer_specdec.scheduling.planner import VerificationPlanner

if TYPE_CHECKING:
    from deepinfer_sched import Scheduler
    from deepinfer_specdec.scheduling.switch import SpeculationSwitch

    from deepinfer_offline.engine.native.answer import Answer
    from deepinfer_offline.engine.native.dspark import DSparkDrafter
    from deepinfer_offline.engine.native.results import StepResult

LAG = 2  # steps between the block that a budget looks at last, and the step it is for
OUTLIER = 1.5  # a step that took more than this times what such steps take was held up by something else


class AheadDrafts:
    """Plans steps ahead for a drafter whose blocks are made by the steps themselves. Called by the loop's thread only.

    Args:
        drafter: learns its calibration from the blocks.
        scheduler: of the engine.
        edge: share that a step with drafts must promise over one without.
        builds: whether kernels are built for every size of a step, as on a CPU.
        graphs: sizes in tokens that steps with drafts are padded to, see `AheadSteps.graphs`.

    Attributes:
        plain: what steps take in this loop that neither draft nor verify.
        costs: what those take that draft, whatever they verify. A step without verified drafts is one of them, dearer than a
            plain one.
    """

    def __init__(
        self, drafter: DSparkDrafter, scheduler: Scheduler, edge: float, *, builds: bool, graphs: Sequence[int]
    ) -> None:
        self._drafter, self._scheduler = drafter, scheduler
        self.plain = StepCosts()
        self.costs = ahead_costs(builds=builds, graphs=graphs)
        slots = scheduler.config.max_running
        self._planner = VerificationPlanner(slots, drafter.max_draft, edge, LAG)
        self._of = np.full(slots, -1, np.int64)  # the sequence that the planner's blocks of a slot belong to
        self._applied = 0  # the last step whose results are known
        self._plain = 0  # the last step that was planned without any drafts

    @property
    def possible(self) -> bool:
        """Whether the next step can be planned ahead. Rows bound to a grammar need the tokens on the host: a draft is masked
        place by place, each mask after the drafts before it.
        """
        state = self._scheduler.state
        return not state.constrained[state.seq_ids >= 0].any()

    def offer(self, *, plain: bool, fixed: int | None = None) -> DraftsAhead:
        """How to plan the next step.

        Args:
            plain: neither draft nor verify in this step, to see what that takes; one such step is in flight at a time.
            fixed: verify this many in every row instead.
        """
        if plain and self._plain <= self._applied:
            return DraftsAhead(0, self._none)

        def budget(step: int, slots: np.ndarray, most: np.ndarray, room: int) -> int:
            if fixed is not None:
                return int(np.minimum(most, fixed).sum())
            if not most.any() or not self.costs.known:
                return 0
            self._meet(slots)
            return self._planner.budget(step, slots, self.seconds(len(slots))[: max(0, room) + 1], counts=most)

        return DraftsAhead(self._drafter.max_draft, budget)

    def seconds(self, rows: int) -> np.ndarray:
        """float64 [n + 1], what steps of these rows take that verify 0 to all of the drafts they may have."""
        return self.costs.drafting(rows, rows * self._drafter.max_draft)

    def learn(
        self, result: StepResult, rows: int, seconds: float, saved: float, switch: SpeculationSwitch | None
    ) -> None:
        """What a step took that ran ahead and drafted, and with a `switch` what that says of speculation.

        Args:
            result: of the step, which only decoded.
            rows: of the step.
            seconds: from the results before to its own.
            saved: accepted drafts by their worth.
            switch: of the present load; None while speculation is forced.
        """
        drafts = int(result.verified.sum())
        self.costs.observe(rows, drafts, seconds)
        self.plain.pass_drafts(rows)
        if switch is not None and self.plain.known:
            expected = float(self.seconds(rows)[drafts])
            without = (rows + saved) * self.plain.ahead(rows) / rows
            switch.measure(without, min(seconds, OUTLIER * expected))

    def landed(self, result: StepResult, answers: Mapping[int, Answer]) -> None:
        """A step's results were applied: settle the blocks it verified, remember the ones it drafted."""
        plan, drafted = result.plan, result.drafted
        self._applied = plan.step
        if drafted is None:
            return
        ids = plan.seq_ids[drafted.plan_rows]
        live = np.array([seq_id in answers for seq_id in ids.tolist()], bool)
        live &= self._scheduler.state.seq_ids[plan.slots[drafted.plan_rows]] == ids
        self._drafter.guess(ids[live].tolist(), drafted.token_ids[live], drafted.confidence[live])
        slots = plan.slots[drafted.plan_rows][live]
        self._meet(slots)
        self._planner.record(plan.step, slots, self._drafter.calibration.scaling.survival(drafted.confidence[live]))

    def _none(self, step: int, _slots: np.ndarray, _most: np.ndarray, _room: int) -> int:
        self._plain = step
        return 0

    def _meet(self, slots: np.ndarray) -> None:
        """What the former sequence of a slot drafted no longer counts."""
        now = self._scheduler.state.seq_ids[slots]
        for slot in slots[self._of[slots] != now].tolist():
            self._planner.begin(slot)
        self._of[slots] = now
