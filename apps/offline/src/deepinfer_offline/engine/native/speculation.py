"""Speculation in the native loop: drafts without a model, verified only while that makes the job faster.

The runner draws every position of a verified row with the position's own random number and keeps drafts while they
agree with what it drew. Tokens therefore equal plain decoding's, greedy or sampled, whatever is drafted and however
much of it is verified; so budgets may look at the current drafts (`deepinfer_specdec.scheduling.budget.live_budget`).

While it is off the loop runs one step ahead as ever, and drafts are scored against the tokens that come anyway. While
it is on the loop is synchronous: a draft follows a token that must be known.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from deepinfer_specdec import Draft, Drafter, SpeculationStatistics, admit, create_drafter
from deepinfer_specdec.scheduling.budget import expected_tokens
from deepinfer_specdec.scheduling.costs import StepCosts
from deepinfer_specdec.scheduling.switch import SpeculationSwitch

from deepinfer_offline.engine.base import EngineStartError

if TYPE_CHECKING:
    from deepinfer_sched import Scheduler

    from deepinfer_offline.engine.native.answer import Answer
    from deepinfer_offline.engine.native.runner import ModelRunner, StepResult
    from deepinfer_offline.models.base import CacheGroup

_LOG = logging.getLogger(__name__)
_EDGE = 1.03  # expected gain from which a step verifies anything: forecasts err
_SHADOW_EVERY = 4  # steps between two unverified drafts while speculation is off


class Speculation:
    """Drafts, budgets and their bookkeeping for one engine. Called by the loop's thread only.

    Args:
        drafter: guesses from token ids.
        scheduler: takes the lengths to verify.
        runner: takes the draft ids.
        reason: why this drafter, for the report.
        forced: verify whenever the budget says so, even where the loop would do better without (for tests).
    """

    def __init__(
        self, drafter: Drafter, scheduler: Scheduler, runner: ModelRunner, reason: str = "", forced: bool = False
    ) -> None:
        self._drafter = drafter
        self._scheduler = scheduler
        self._runner = runner
        self._reason = reason
        self._forced = forced
        self._switch = SpeculationSwitch()
        self._costs = StepCosts()
        self._known: set[int] = set()
        self._drafted: dict[int, int] = {}  # sequence -> drafts made for the next step, before trimming
        self.statistics = SpeculationStatistics()
        self._landed = 0.0  # clock when the last step's results were taken
        self._steps = 0
        self._was_synchronous = False
        self._comparing = False  # the step in flight runs without drafts to know what they are worth

    @property
    def synchronous(self) -> bool:
        """Whether the loop must take a step's results before it plans the next one."""
        return self._forced or self._switch.on

    def begin(self, answer: Answer) -> None:
        """Follow a sequence from its admission on. A sequence that comes back after a preemption is known already."""
        seq = answer.seq
        if seq.seq_id not in self._known:
            self._known.add(seq.seq_id)
            self._drafter.begin(seq.seq_id, seq.tokens)

    def end(self, seq_id: int) -> None:
        """Forget a sequence. Unknown ids are ignored."""
        if seq_id in self._known:
            self._known.discard(seq_id)
            self._drafter.end(seq_id)
        self._drafted.pop(seq_id, None)

    def extend(self, seq_id: int, tokens: Sequence[int]) -> None:
        """A sequence has said `tokens`."""
        if seq_id in self._known:
            self._drafter.extend(seq_id, tokens)

    def propose(self, answers: Iterable[Answer]) -> None:
        """Before a plan of the synchronous loop: draft for every row that is ready, and tell scheduler and runner."""
        rows = [answer for answer in answers if self._is_ready(answer)]
        self._drafted = {}
        if not rows:
            return
        draft = self._drafter.propose([answer.seq.seq_id for answer in rows], self._limits(rows))
        self._comparing = self._costs.needs_plain(draft.rows)
        lengths = np.zeros(draft.rows, np.int32) if self._comparing else self._budget(draft)[1]
        for answer, made, length, ids in zip(
            rows, draft.counts.tolist(), lengths.tolist(), draft.token_ids.tolist(), strict=True
        ):
            seq = answer.seq
            self._drafted[seq.seq_id] = made
            self._scheduler.propose(seq.seq_id, length)
            if length:
                self._runner.write_drafts(seq.slot, len(seq.tokens), ids[:length])

    def landed(self, result: StepResult, answers: Iterable[Answer]) -> None:
        """After a step's results were applied: learn what it cost and gave, and decide how the loop goes on."""
        now = time.perf_counter()
        plan = result.plan
        self._steps += 1
        rows = ~plan.prefills
        decodes, drafts = int(rows.sum()), int(plan.drafts.sum())
        if decodes and decodes == plan.num_rows:
            self._costs.observe(decodes, drafts, result.seconds)
            if self.synchronous and self._was_synchronous:
                self._costs.observe_host(now - self._landed - result.seconds, result.seconds)
        if decodes and self.synchronous:
            self._count(result, rows)
        if decodes and decodes == plan.num_rows and not self._forced:
            self._decide(result, decodes, answers)
        self._was_synchronous = self.synchronous
        self._landed = time.perf_counter()

    def report(self) -> dict[str, Any]:
        """For the end-of-run report."""
        return {
            "drafter": self._drafter.name,
            "reason": self._reason,
            "switches": self._switch.changes,
            **self.statistics.as_dict(),
        }

    # --- decisions -------------------------------------------------------------------------------------------

    def _decide(self, result: StepResult, rows: int, answers: Iterable[Answer]) -> None:
        per_token = self._costs.plain(rows) / rows
        if self._switch.on and self._comparing:
            return
        if self._switch.on:
            emitted = int(result.num_tokens.sum())
            seconds = result.seconds + self._costs.host_seconds(rows)
            if not self._switch.measure(emitted * per_token, seconds):
                self._clear(answers)
        elif self._steps % _SHADOW_EVERY == 0 and self._costs.known:
            self._expect(answers)

    def _expect(self, answers: Iterable[Answer]) -> None:
        """Off: what would drafts save now? Nothing is verified."""
        rows = [answer for answer in answers if self._may_draft(answer)]
        if not rows:
            return
        draft = self._drafter.propose([answer.seq.seq_id for answer in rows], self._limits(rows))
        gained, lengths = self._budget(draft)
        plain = self._costs.plain(len(rows))
        extra = float(self._costs.extra(len(rows), int(lengths.sum()))[-1])
        self._switch.expect(
            (len(rows) + gained) * plain / len(rows), plain + extra + self._costs.host_seconds(len(rows))
        )

    def _budget(self, draft: Draft) -> tuple[float, np.ndarray]:
        """Expected accepted drafts, and the lengths to verify, by the best rate over all budgets."""
        survivals = draft.survivals()
        tokens = expected_tokens(survivals)
        rows = draft.rows
        seconds = self._costs.plain(rows) + self._costs.extra(rows, tokens.size - 1) + self._costs.host_seconds(rows)
        if not self._costs.known:
            return 0.0, np.zeros(rows, np.int32)
        rate = (rows + tokens) / seconds
        budget = int(rate.argmax())
        if rate[budget] < _EDGE * rate[0]:
            budget = 0
        return float(tokens[budget]), admit(survivals, draft.counts, budget)

    def _is_ready(self, answer: Answer) -> bool:
        """Whether the next row of the sequence follows a token that is known."""
        state, slot = self._scheduler.state, answer.seq.slot
        return slot >= 0 and self._may_draft(answer) and not state.pending[slot]

    def _may_draft(self, answer: Answer) -> bool:
        state, slot = self._scheduler.state, answer.seq.slot
        return (
            slot >= 0
            and answer.seq.seq_id in self._known
            and state.seq_ids[slot] == answer.seq.seq_id
            and state.computed[slot] >= state.target[slot]
        )

    def _limits(self, rows: Sequence[Answer]) -> np.ndarray:
        """Tokens that each row may still emit after its next one; none where a grammar chooses the tokens."""
        room = [0 if row.matcher is not None else row.limit - len(row.seq.tokens) - 1 for row in rows]
        return np.clip(np.array(room, np.int32), 0, self._drafter.max_draft)

    def _clear(self, answers: Iterable[Answer]) -> None:
        for answer in answers:
            if answer.seq.slot >= 0:
                self._scheduler.propose(answer.seq.seq_id, 0)

    def _count(self, result: StepResult, rows: np.ndarray) -> None:
        plan = result.plan
        taken = rows & (result.num_tokens > 0)
        made = [self._drafted.get(seq_id, 0) for seq_id in plan.seq_ids[taken].tolist()]
        self.statistics.record(np.array(made, np.int64), plan.drafts[taken], result.num_tokens[taken] - 1)


_REASONS = {
    "auto": "suffix: needs no draft model, and outputs of one job repeat its prompts and each other",
    "ngram": "chosen by --speculative",
    "suffix": "chosen by --speculative",
}


def make_speculation(
    wanted: str, groups: Iterable[CacheGroup], scheduler: Scheduler, runner: ModelRunner
) -> Speculation | None:
    """What `--speculative` asks for; None for `off`, and for `auto` where the model cannot take drafts back.

    Args:
        wanted: `off`, `auto`, `ngram` or `suffix`.
        groups: cache groups of the model.
        scheduler, runner: of the engine.

    Raises:
        EngineStartError: the wanted drafter cannot serve this model.
    """
    if wanted == "off":
        return None
    kept = sorted(group.name for group in groups if group.kind != "prefix")
    if kept and wanted == "auto":
        _LOG.info("speculation is off: the model's cache groups %s cannot take rejected drafts back", ", ".join(kept))
        return None
    if kept:
        raise EngineStartError(
            f"--speculative {wanted}: the model's cache groups {', '.join(kept)} cannot take rejected drafts back; "
            "use auto or off"
        )
    drafter = create_drafter("suffix" if wanted == "auto" else wanted)
    _LOG.info("speculation with the %s drafter: %s", drafter.name, _REASONS[wanted])
    return Speculation(drafter, scheduler, runner, _REASONS[wanted])
