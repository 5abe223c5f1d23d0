"""Speculation in the native loop: drafts without a model, verified only while that makes the job faster.

The runner draws every position of a verified row with the position's own random number and keeps drafts while they
agree with what it drew. Tokens therefore equal plain decoding's, greedy or sampled, whatever is drafted and however
much of it is verified, but where a step of another size rounds logits otherwise, as batches of other sizes do without
drafts; so budgets may look at the current drafts (`deepinfer_specdec.scheduling.budget.live_budget`).

While it is off the loop runs one step ahead as ever. Now and then a few rows are drafted and nothing is verified: the
tokens that come anyway say what the drafts were worth. This may take a small share of the time, by the clock. While it
is on the loop is synchronous, since a draft follows a token that must be known, unless the steps themselves draft
(`deepinfer_offline.engine.native.ahead_drafts`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from deepinfer_specdec import Draft, Drafter
from deepinfer_specdec.scheduling.budget import EDGE, best_budget, expected_tokens
from deepinfer_specdec.scheduling.choice import choose, round_sizes
from deepinfer_specdec.scheduling.costs import StepCosts
from deepinfer_specdec.scheduling.credit import WorkCredit
from deepinfer_specdec.scheduling.hopes import Hopes
from deepinfer_specdec.scheduling.switch import LoadSwitches
from deepinfer_specdec.scheduling.worth import scaled_tokens, token_worth, worthless_below

from deepinfer_offline.engine.native.ahead_drafts import OUTLIER
from deepinfer_offline.engine.native.following import Following
from deepinfer_offline.engine.native.grammar_drafts import within_grammars
from deepinfer_offline.engine.native.paces import Paces
from deepinfer_offline.engine.native.running_rows import RunningRows, running_rows
from deepinfer_offline.engine.native.speculation_account import SpeculationAccount

if TYPE_CHECKING:
    from deepinfer_sched import DraftsAhead, Scheduler

    from deepinfer_offline.engine.native.ahead_drafts import AheadDrafts
    from deepinfer_offline.engine.native.answer import Answer
    from deepinfer_offline.engine.native.results import StepResult
    from deepinfer_offline.engine.native.runner import ModelRunner

_SHARE = 0.005  # of the time, for drafts that nobody verifies; it slows the steps that run meanwhile by as much
_START, _SAVED = 0.003, 0.004  # seconds of such work to begin with, and at most saved up
_URGENT = 2  # forecasts on credit when a good part of the rows begin their answers; and after one that promised a gain
_BEGUN = 8  # one row of so many is a good part
_YOUNG = 4  # tokens before which an answer does not show whether it repeats anything
_PROBED_ROWS = 8  # rows drafted at once while off
_PROBED_TOKENS = 1024  # that the drafter is told at once then, about 2 ms
_TRIAL_AFTER = 6  # decode steps


@dataclass(frozen=True, slots=True)
class _Proposal:
    """What was drafted for the next step of the synchronous loop.

    Attributes:
        made, worth: [slots], drafts, and worth of a token of each.
    """

    made: np.ndarray
    worth: np.ndarray


class Speculation:
    """Drafts, budgets and their bookkeeping for one engine. Called by the loop's thread only.

    Args:
        drafter: guesses from token ids.
        scheduler: takes the lengths to verify.
        runner: takes the draft ids.
        reason: why this drafter, for the report.
        ahead: plans steps whose drafts stay on the device; None where every draft passes through the host.
        trial: try it once it is known what steps take without it. For a drafter that runs on the device: to draft without
            verifying costs it nearly as much as to verify, so too few forecasts would be made.
    """

    def __init__(
        self,
        drafter: Drafter,
        scheduler: Scheduler,
        runner: ModelRunner,
        reason: str = "",
        trial: bool = False,
        ahead: AheadDrafts | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._reason = reason
        self._trial = self._on_device = trial
        self._ahead = ahead
        self._fixed: int | None = None
        self._forced = False
        self._following = Following(drafter)
        self._switches = LoadSwitches()
        self._costs = StepCosts()
        self._plain_costs = [self._costs] if ahead is None else [self._costs, ahead.plain]
        self._credit = WorkCredit(_SHARE, _START, _SAVED)
        self._urgent = 0  # forecasts that may still be made on credit
        self._proposal: _Proposal | None = None
        # The last prices, and the floor and the fixed share of a step that go with them.
        self._floor_of: tuple[np.ndarray | None, float] = (None, 0.0)
        self._share_of: tuple[np.ndarray | None, float] = (None, 0.0)
        self._paces = Paces(len(scheduler.state.seq_ids))
        self.account = SpeculationAccount()
        self._landed = 0.0  # clock when the last step's results were taken
        self._runs_ahead = False  # the step in flight was launched before the last one had landed
        self._disturbed = True  # drafts were made while the step in flight ran, or it is the first after a prompt
        self._hopes = Hopes()
        self._hope = 0.0  # drafts of the step in flight that are to be kept on average, by worth
        # Of the step in flight: slots, survivals of their drafts, worth of a token of each.
        self._judged: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
        self._expected = 0.0  # seconds, of the step in flight if it is synchronous
        self._comparing = False  # the step in flight runs without drafts to know what they are worth

    def force(self, length: int | None = None, drafter: Drafter | None = None) -> None:
        """Stay on, whatever it costs: `length` drafts in every row, or what the budget says; with another drafter if one is
        given. For tests and comparisons.

        May be called at any time. Steps in flight end as they were planned; what they drafted for a drafter that is replaced
        is verified no more, and nothing is learned from it. Another drafter is told all that the sequences have said.
        """
        self._forced, self._fixed = True, length
        if drafter is not None:
            self._following, self._ahead = Following(drafter), None
            self._hopes, self._judged, self._proposal = Hopes(), None, None

    @property
    def synchronous(self) -> bool:
        """Whether drafts are verified: then the loop takes a step's results before it plans the next one, unless `ahead`."""
        return self._forced or self._switches.current.on

    def end(self, answer: Answer) -> None:
        """Forget a sequence."""
        self._following.end(answer)

    def ahead(self) -> DraftsAhead | None:
        """How to plan the next step while others are in flight; None when its drafts must follow tokens that are known."""
        if self._ahead is None or not self._ahead.possible:
            return None
        rows, costs = self._scheduler.num_running, self._ahead.plain
        plain = not self._forced and self._measurable and costs.needs_plain(rows, self._switches.current.gain)
        return self._ahead.offer(plain=plain, fixed=self._fixed)

    def propose(self, answers: Mapping[int, Answer]) -> None:
        """Before a plan of the synchronous loop: draft for every row that is ready, and tell scheduler and runner."""
        self._proposal = self._judged = None
        rows = running_rows(self._scheduler.state, answers, ready=True)
        if not len(rows):
            return
        if self._fixed is None:
            worth, seconds = self._worth(rows), self._seconds(len(rows))
            draft = self._draft(rows, self._floor(worth, seconds))
            survivals = draft.survivals()
            lengths = self._lengths(draft, survivals, worth, seconds)
        else:
            worth, draft = np.ones(len(rows)), self._draft(rows, 0.0)
            survivals = draft.survivals()
            lengths = np.minimum(draft.counts, self._fixed).astype(np.int32)
        for place in np.flatnonzero(rows.constrained).tolist():  # their masks follow their drafts
            rows.answers[place].drafts = draft.token_ids[place, : lengths[place]].tolist()
        self._scheduler.propose_rows(rows.slots, lengths)
        slots = len(self._scheduler.state.seq_ids)
        self._proposal = _Proposal(np.zeros(slots, np.int32), np.ones(slots))
        self._proposal.made[rows.slots], self._proposal.worth[rows.slots] = draft.counts, worth
        if lengths.any():
            self._judged = rows.slots, survivals, worth
            self._runner.write_drafts(rows.slots, rows.lengths.astype(np.int64), draft.token_ids, lengths)

    def landed(self, result: StepResult, answers: Mapping[int, Answer]) -> None:
        """After a step's results were applied: learn what it cost and gave, and decide how the loop goes on."""
        now = time.perf_counter()
        plan, on, ahead = result.plan, self.synchronous, self._runs_ahead
        rows = ~plan.prefills
        decodes = int(rows.sum())
        # From one step's results to the next one's; a longer gap is the caller's, or there was nothing to run.
        passed = min(now - self._landed, 2.0 * result.seconds)
        self._landed, self._runs_ahead = now, self._scheduler.in_flight > 0
        steady = decodes == plan.num_rows and not result.first
        if decodes < plan.num_rows and _BEGUN * int((plan.prefills & plan.samples).sum()) >= plan.num_rows:
            self._urgent = _URGENT
        self._following.hear(result)
        if self._ahead is not None:
            self._ahead.landed(result, answers)
        if not decodes:
            self._proposal = self._judged = None
            return
        self.account.steps[on] += 1
        drafts_itself = plan.ahead is not None and plan.ahead.width > 0
        self._credit.earn(passed)
        disturbed, self._disturbed = self._disturbed, not steady
        if not result.verified.any():
            self._hopes.rest()
        if steady and ahead and not disturbed and not drafts_itself:
            for costs in self._plain_costs:
                costs.observe_ahead(decodes, max(passed, result.seconds))
        if on:
            saved = self._count(result, rows)
            if steady and ahead and drafts_itself and self._ahead is not None:
                switch = None if self._forced else self._switches.current
                self._ahead.learn(result, decodes, max(passed, result.seconds), saved, switch)
            elif steady and not ahead and plan.ahead is None:
                self._learn(result, decodes, passed)
        elif self._trial and steady and self.account.steps[False] > _TRIAL_AFTER:
            self._trial = False
            self._switches.meet(decodes).try_on()
        elif not self._switches.current.rest() and self._costs.known and (self._credit.ready or self._urgent):
            self._probe(answers)
        if not self._forced:
            self._turn(decodes, on, answers)

    def report(self) -> dict[str, Any]:
        """For the end-of-run report."""
        return {
            "drafter": self._following.drafter.name,
            "reason": self._reason,
            "switches": self._switches.changes,
            **self.account.report(),
        }

    # --- decisions -------------------------------------------------------------------------------------------

    def _learn(self, result: StepResult, rows: int, passed: float) -> None:
        """On: what did the step cost, and did it pay? That is judged by the drafts that were to be kept on average: luck of few
        rows would outweigh the rest.
        """
        drafts = int(result.plan.drafts.sum())
        typical = self._costs.observe(rows, drafts, result.seconds)
        self._costs.observe_host(rows, passed - result.seconds, result.seconds)
        if self._comparing or self._forced:
            return
        plain = self._costs.least(rows)
        if drafts:
            if typical:
                without = (rows + self._hope) * plain / rows
                self._switches.current.measure(without, min(passed, OUTLIER * self._expected))
        else:
            self._switches.current.wait(float(self._costs.synchronous(rows, 0)[0]) / plain - 1.0)

    def _turn(self, rows: int, was_on: bool, answers: Mapping[int, Answer]) -> None:
        """Go on as the present load's switch says. Drafts that were proposed for the next step are taken back."""
        if was_on and not self._switches.meet(rows).on:
            slots = running_rows(self._scheduler.state, answers, ready=False).slots
            self._scheduler.propose_rows(slots, np.zeros(len(slots), np.int32))
        else:
            self._switches.meet(rows)

    def _probe(self, answers: Mapping[int, Answer]) -> None:
        """Off: what would drafts save now? A few rows are drafted, nothing is verified.

        Not while most answers begin: such forecasts say no, and are paid for with those that could say yes later.
        """
        running = running_rows(self._scheduler.state, answers, ready=False)
        if 2 * sum(len(one.seq.tokens) < one.seq.num_prompt + _YOUNG for one in running.answers) > len(running):
            return
        self._urgent = max(0, self._urgent - 1)
        self._disturbed = True
        if self._on_device and self._scheduler.awaits_masks:
            return  # a draft would wait behind masks that are filled when this returns
        rows = self._sample(running)
        # Not on credit: a text is told once, and what its prompt took is a hundred times as long.
        self._following.tell(rows.answers)
        begin = time.perf_counter()
        if len(rows):
            worth, seconds = self._worth(running), self._seconds(len(running))
            draft = self._draft(rows, self._floor(worth, seconds))
            without, along = self._forecast(draft, rows, len(running), seconds)
            self.account.best_gain = max(self.account.best_gain, without / along)
            switch = self._switches.current
            if not switch.expect(without, along) and switch.promising:
                self._urgent = max(self._urgent, 1)
        self._credit.spend(time.perf_counter() - begin)

    def _draft(self, rows: RunningRows, floor: float) -> Draft:
        """What the drafter, or a grammar, has for the rows."""
        limits = rows.limits(self._following.drafter.max_draft)
        draft = self._following.draft(rows.answers, limits, floor)
        return within_grammars(draft, rows.answers, limits) if rows.constrained.any() else draft

    def _forecast(self, draft: Draft, rows: RunningRows, decodes: int, seconds: np.ndarray) -> tuple[float, float]:
        """Seconds that the tokens of a step with drafts would take without speculation, and with it.

        A step is in flight, so it is the second column that could be verified first. A row's pace is what its draft promises:
        rows without drafts are the ones that the others will wait for.
        """
        plain = self._costs.ahead(decodes)
        if int(draft.counts.max()) < 2:
            return plain, float(seconds[0])
        value = self._hopes.believed(draft.survivals())[:, 1:]
        worth = self._worth(rows, 1.0 + value.sum(axis=1))
        tokens = scaled_tokens(expected_tokens(value * worth[:, None]), len(rows), decodes)
        best = best_budget(tokens, decodes, seconds, EDGE)
        return (1.0 + float(tokens[best]) / decodes) * plain, float(seconds[best])

    def _sample(self, rows: RunningRows) -> RunningRows:
        """Rows to look at: those that are followed already, then new ones as long as little has to be read for them."""
        follows, behind = self._following.follows, self._following.behind
        chosen: list[int] = []
        unread = 0
        for place in sorted(range(len(rows)), key=lambda place: not follows(rows.answers[place]))[:_PROBED_ROWS]:
            unread += behind(rows.answers[place])
            if chosen and unread > _PROBED_TOKENS:
                break
            chosen.append(place)
        return rows.some(chosen)

    def _lengths(self, draft: Draft, survivals: np.ndarray, worth: np.ndarray, seconds: np.ndarray) -> np.ndarray:
        """How much of each row's draft to verify, int32 [R]: the best budget, spent where drafts save most. None where the
        step shall say what drafts are measured against.
        """
        self._comparing, self._expected = False, float(seconds[0])
        none = np.zeros(draft.rows, np.int32)
        if not self._costs.known:
            return none
        values = self._hopes.believed(survivals) * worth[:, None]
        choice = choose(values, draft.counts, seconds, EDGE, round_sizes)
        if not choice.budget:
            return none
        gain = choice.gain * self._costs.ahead(draft.rows) / float(seconds[0])
        self._comparing = not self._forced and self._measurable and self._costs.needs_plain(draft.rows, gain)
        if self._comparing:
            return none
        self._expected = float(seconds[choice.budget])
        self._hope = draft.rows * (choice.gain * self._expected / float(seconds[0]) - 1.0)
        return choice.lengths

    def _seconds(self, rows: int) -> np.ndarray:
        """float64 [n + 1], what synchronous steps with 0 to all the drafts that `rows` sequences may have take."""
        return self._costs.synchronous(rows, rows * self._following.drafter.max_draft)

    def _floor(self, worth: np.ndarray, seconds: np.ndarray) -> float:
        """Survival below which no draft of rows of this `worth` [R] can pay."""
        if not self._costs.known:
            return 0.0
        if self._floor_of[0] is not seconds:
            self._floor_of = seconds, worthless_below(len(worth), seconds)
        return self._floor_of[1] / float(worth.max())

    def _worth(self, rows: RunningRows, pace: np.ndarray | None = None) -> np.ndarray:
        """What an accepted token of each row saves against the average, float64 [R]. `pace`: tokens that each will emit per
        step; None for what it emitted of late.
        """
        if self._scheduler.num_waiting or len(rows) < 2:
            return np.ones(len(rows))
        if pace is None:
            pace = self._paces.of(rows.slots, rows.seq_ids)
        seconds = self._seconds(len(rows))
        if self._share_of[0] is not seconds:
            self._share_of = seconds, self._costs.fixed_share(len(rows))
        return token_worth(rows.left / pace, self._share_of[1])

    @property
    def _measurable(self) -> bool:
        """Whether the next step may say what plain ones take: with prompts in it, it would not."""
        state = self._scheduler.state
        running = state.seq_ids >= 0
        return bool(running.any() and (state.computed >= state.target)[running].all())

    def _count(self, result: StepResult, rows: np.ndarray) -> float:
        """Take a step into the statistics; returns its accepted drafts, each by its worth."""
        plan = result.plan
        taken = rows & (result.num_tokens > 0)
        slots, ids = plan.slots[taken], plan.seq_ids[taken]
        verified, accepted = result.verified[taken], result.num_tokens[taken] - 1
        proposal, self._proposal = self._proposal, None  # for this step; the next may be planned without a look at it
        made = np.zeros(len(slots), np.int32) if proposal is None else proposal.made[slots]
        self.account.count(plan.drafts[taken] if plan.ahead is not None else made, verified, accepted)
        self._settle(slots, verified, accepted)
        alive = self._scheduler.state.seq_ids[slots] == ids
        self._paces.learn(slots[alive], ids[alive], 1.0 + accepted[alive])
        return float(accepted.sum() if proposal is None else accepted @ proposal.worth[slots])

    def _settle(self, slots: np.ndarray, verified: np.ndarray, kept: np.ndarray) -> None:
        """Learn what survivals were worth: drafts verified and kept in a step's `slots` [R]."""
        if self._judged is not None:
            judged, survivals, worth = self._judged
            tried, right = np.zeros((2, len(self._scheduler.state.seq_ids)), np.int32)
            tried[slots], right[slots] = verified, kept
            self._hopes.settle(survivals, worth, tried[judged], right[judged])
            self._judged = None
