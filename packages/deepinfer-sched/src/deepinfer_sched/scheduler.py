"""Which sequences run in the next step, and what each computes."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np

from deepinfer_sched.ahead import Ahead, DraftsAhead
from deepinfer_sched.cache import Cache, Hit
from deepinfer_sched.cascade import CascadeFinder
from deepinfer_sched.config import SchedConfig
from deepinfer_sched.decoding import ready_slots, rows_without_room, wanted_drafts
from deepinfer_sched.errors import SchedError, SequenceError
from deepinfer_sched.limits import check_sequence, last_length
from deepinfer_sched.prefixes import PrefixWork
from deepinfer_sched.running import RunningSet
from deepinfer_sched.sequence import Sequence, Status, append_tokens
from deepinfer_sched.step import StepPlan
from deepinfer_sched.waiting import WaitingQueue

_Chunk = tuple[Sequence, int]  # a prompt and how many of its tokens the step computes


class Scheduler:
    """Continuous batching with chunked prefill, one step ahead of its results. Single-threaded.

    The loop of an engine:

        plan = scheduler.plan()                      # step n+1; None when nothing can be planned now
        flight = runner.launch(plan)
        ids, counts, stops = runner.collect(previous)
        done = scheduler.apply(previous.plan, ids, counts, stops)   # step n

    `plan` may be called again before `apply`, up to `max_in_flight` steps; `apply` takes the plans in their order. A
    row of a sequence that has meanwhile finished is ignored by `apply`; its blocks and its slot are handed out again
    only when no step in flight reads them.
    """

    def __init__(self, config: SchedConfig, cache: Cache) -> None:
        self.config = config
        self.cache = cache
        self._sequences: dict[int, Sequence] = {}
        self._waiting = WaitingQueue()
        self._running = RunningSet(config.max_running)
        self.state = self._running.state
        self._prefixes = PrefixWork(cache, self._running)
        self._cascades = CascadeFinder(cache.page_size, config.cascade_min_rows, config.cascade_min_tokens)
        self._flights: deque[tuple[StepPlan, list[Sequence]]] = deque()
        self._step = 0
        self._applied = 0
        self._orders = 0
        self._preempted: list[int] = []
        self._finished: list[int] = []

    # --- requests --------------------------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Queue a sequence.

        Raises:
            SequenceError: it is known already, or it can never run within the limits; nothing was queued.
        """
        if seq.seq_id in self._sequences:
            raise SequenceError(f"sequence {seq.seq_id} is already known")
        check_sequence(seq, self.config, self.cache)
        seq.order = self._orders
        self._orders += 1
        self._sequences[seq.seq_id] = seq
        self._waiting.arrive(seq, self._step)
        self._expect(seq)

    def abort(self, seq_id: int) -> None:
        """Forget a sequence, whatever it is doing. Unknown ids are ignored."""
        seq = self._sequences.get(seq_id)
        if seq is not None:
            self._finish(seq)

    def preempt(self, seq_id: int) -> None:
        """Take a running sequence's slot and blocks; it is computed again later, found prefixes excepted."""
        seq = self._sequences.get(seq_id)
        if seq is None or seq.status is not Status.RUNNING:
            raise SequenceError(f"sequence {seq_id} is not running")
        self._preempt(seq)

    def propose(self, seq_id: int, drafts: int) -> None:
        """The next row of a running sequence verifies up to `drafts` draft tokens (the token budget may grant fewer).

        Such a row is planned when none of the sequence's tokens is in flight, since drafts follow a known token.
        """
        seq = self.sequence(seq_id)
        if drafts < 0:
            raise SchedError(f"sequence {seq_id}: {drafts} drafts; must not be negative")
        if seq.status is Status.RUNNING:
            self.state.drafts[seq.slot] = drafts

    def propose_rows(self, slots: np.ndarray, drafts: np.ndarray) -> None:
        """`propose` for the running sequences in `slots` [R]. Raises SchedError for other slots, or less than 0 `drafts` [R]."""
        if (self.state.seq_ids[slots] < 0).any() or (drafts < 0).any():
            raise SchedError(f"slots {slots}, drafts {drafts}; allowed: slots of running sequences, 0 drafts or more")
        self.state.drafts[slots] = drafts

    def sequence(self, seq_id: int) -> Sequence:
        """The unfinished sequence with this id."""
        if seq_id not in self._sequences:
            raise SequenceError(f"no unfinished sequence {seq_id}")
        return self._sequences[seq_id]

    @property
    def has_unfinished(self) -> bool:
        return bool(self._sequences) or bool(self._flights)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def in_flight(self) -> int:
        """Steps planned and not yet applied."""
        return len(self._flights)

    @property
    def awaits_masks(self) -> bool:
        """Whether a step in flight samples under a grammar."""
        return any((plan.constrained & plan.samples).any() for plan, _ in self._flights)

    # --- a step ----------------------------------------------------------------------------------------------

    def plan(self, ahead: DraftsAhead | None = None) -> StepPlan | None:
        """Plan the next step. Decode rows come first, then running prefills, then admissions.

        Args:
            ahead: drafts are made and shared out on the device. A row is then planned with room for all drafts it may
                verify although tokens of it are in flight; without, it waits until the drafts in flight are verified.

        Returns:
            None when nothing can be planned now: apply a step in flight first, or there is no work.
        """
        if len(self._flights) >= self.config.max_in_flight:
            return None
        step = self._step + 1
        self.cache.begin(step)
        decodes, counts, shared = self._plan_decodes(step, ahead)
        chunks: list[_Chunk] = []
        budget = self.config.max_tokens_per_step - (
            int(counts.sum()) if shared is None else len(counts) + shared.budget
        )
        budget = self._continue_prefills(chunks, budget)
        admitted = self._admit(chunks, budget)
        if not self.config.share_in_step:
            for seq, chunk in chunks:
                self._prefixes.commit_prompt(seq, int(self.state.computed[seq.slot]) + chunk)
        if not len(decodes) and not chunks:
            return None
        self._step = step
        return self._launch(step, decodes, counts, chunks, admitted, shared)

    def apply(
        self, plan: StepPlan, token_ids: np.ndarray, num_tokens: np.ndarray, stops: np.ndarray | None = None
    ) -> list[Sequence]:
        """Take the results of the oldest step in flight.

        Args:
            plan: that step's plan.
            token_ids: int [R, k], sampled or accepted ids of each row, left-aligned.
            num_tokens: int [R], how many of them count; 0 for rows that sample nothing. A verified row gets its
                accepted drafts and one more token; fewer when a stop cuts it short.
            stops: bool [R], the sequence ends with the row's last token (end-of-sequence id, stop string, ...).

        Returns:
            Sequences that finished with this step, by stop or by length.
        """
        if not self._flights or self._flights[0][0] is not plan:
            expected = self._flights[0][0].step if self._flights else "none"
            raise SchedError(f"step {plan.step} is applied, but the oldest step in flight is {expected}")
        sequences = self._flights.popleft()[1]
        self._applied = plan.step
        done = self._take_tokens(plan, sequences, token_ids, num_tokens, stops)
        self._prefixes.commit_generated(plan.slots)
        for seq in done:
            self._finish(seq)
        self.cache.complete(plan.step)
        self._running.complete(plan.step)
        return done

    # --- planning --------------------------------------------------------------------------------------------

    def _plan_decodes(self, step: int, ahead: DraftsAhead | None) -> tuple[np.ndarray, np.ndarray, Ahead | None]:
        """Slots that decode or verify, and the tokens of each; room for them is allocated.

        With `ahead`, rows may start where drafts in flight will lead, and verify drafts that are not known yet: each up to
        what all of them verify together.
        """
        slots = ready_slots(self.state, self._running.slots, self.config, follow=ahead is not None)
        drafts = wanted_drafts(self.state, slots)
        room = self._draft_room(len(slots)) if drafts.any() else 0
        if ahead is None:
            return *self._make_room(slots, np.clip(room - (np.cumsum(drafts) - drafts), 0, drafts)), None
        shared = ahead.share(step, slots, drafts, room)
        slots, counts = self._make_room(slots, np.minimum(drafts, shared.budget))
        return slots, counts, replace(shared, budget=min(shared.budget, int(counts.sum()) - len(counts)))

    def _draft_room(self, rows: int) -> int:
        """Drafts that a step of so many decode rows has tokens for; some are left to prompts when there are any."""
        state, slots = self.state, self._running.slots
        spare = self.config.max_tokens_per_step - rows
        if len(self._waiting) or (state.computed[slots] < state.target[slots]).any():
            spare -= int(spare * self.config.prompt_share)
        return spare

    def _make_room(self, slots: np.ndarray, drafts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Allocate for decode rows in rank order: a token each, preempting from the last rank, then drafts where they fit.

        Returns the slots that found room, and the tokens of each.
        """
        cache, seq_ids = self.cache, self.state.seq_ids
        ends = self.state.computed[slots] + 1
        keep = np.ones(len(slots), bool)
        for row in rows_without_room(cache, slots, ends):
            slot = int(slots[row])
            while seq_ids[slot] >= 0 and not cache.allocate(slot, int(ends[row])):
                if cache.fenced_pages:  # room comes with the next result: sit this step out
                    keep[row] = False
                    break
                self._preempt(self._running.sequences[-1])
        keep &= seq_ids[slots] >= 0
        slots, ends, counts = slots[keep], ends[keep], 1 + drafts[keep].astype(np.int32)
        if drafts.any():
            for row in rows_without_room(cache, slots, ends - 1 + counts):
                if not cache.allocate(int(slots[row]), int(ends[row] - 1 + counts[row])):
                    counts[row] = int(cache.held_pages(slots[row : row + 1])[0]) * cache.page_size - ends[row] + 1
        return slots, counts

    def _continue_prefills(self, chunks: list[_Chunk], budget: int) -> int:
        """Next chunk of each sequence that is still prefilling. Returns what is left of the budget."""
        state, slots = self.state, self._running.slots
        for index in np.flatnonzero(state.computed[slots] < state.target[slots]).tolist():
            if budget <= 0:
                break
            seq = self._running.sequences[index]
            budget -= self._add_chunk(chunks, seq, int(state.computed[seq.slot]), budget)
        return budget

    def _add_chunk(self, chunks: list[_Chunk], seq: Sequence, start: int, budget: int) -> int:
        chunk = min(budget, int(self.state.target[seq.slot]) - start)
        chunks.append((seq, chunk))
        if self.config.share_in_step:
            self._prefixes.commit_prompt(seq, start + chunk)
        return chunk

    def _admit(self, chunks: list[_Chunk], budget: int) -> list[int]:
        """Give waiting sequences a slot, in rank order, as long as slots, pages and the budget last."""
        self._waiting.promote_before(self._patience_ends)
        admitted: list[int] = []
        held: list[Sequence] = []
        while budget > 0 and self._running.has_slot and len(held) <= self.config.lookahead:
            seq = self._waiting.pop()
            if seq is None:
                break
            if seq.last_step > self._applied:  # preempted, and a step in flight still makes its last token
                held.append(seq)
                continue
            seq.hashes = self.cache.hash_tokens(seq.tokens, seq.salt, seq.hashes)
            hit = self.cache.match(seq.hashes if seq.read_cache else [], len(seq.tokens), seq.tokens)
            if seq.read_cache and self._prefixes.is_computing(seq, hit.length // self.cache.page_size):
                held.append(seq)
                continue
            if not self.cache.can_admit(hit, len(seq.tokens), self.config.reserve_pages * len(self._running)):
                held.append(seq)
                break
            self._open(seq, hit)
            budget -= self._add_chunk(chunks, seq, hit.start, budget)
            admitted.append(seq.seq_id)
        for seq in held:
            self._waiting.push(seq)
        return admitted

    def _open(self, seq: Sequence, hit: Hit) -> None:
        seq.slot = self._running.take_slot()
        opened = self.cache.allocate(seq.slot, len(seq.tokens), hit)
        assert opened, f"sequence {seq.seq_id} was admitted without room"
        self._running.open(seq, last_length(seq, self.config), hit)
        self._prefixes.admit(seq, hit.length // self.cache.page_size)
        self.cache.meet(seq.hashes, seq.order)
        if seq.cached_tokens < 0:
            seq.cached_tokens = min(hit.length, seq.num_prompt)

    def _launch(
        self,
        step: int,
        decodes: np.ndarray,
        counts: np.ndarray,
        chunks: list[_Chunk],
        admitted: list[int],
        ahead: Ahead | None,
    ) -> StepPlan:
        """Write the plan down, and what it changes."""
        state = self.state
        slots = np.concatenate([decodes, np.array([seq.slot for seq, _ in chunks], np.int32)])
        counts = np.concatenate([counts, np.array([chunk for _, chunk in chunks], np.int32)])
        starts = state.computed[slots]
        ends = starts + counts
        prefills = np.arange(len(slots)) >= len(decodes)
        samples = ~prefills | (ends >= state.target[slots])
        drafts = np.where(prefills, 0, counts - 1).astype(np.int32)
        prompts = state.target[decodes]
        plan = StepPlan(
            step=step,
            seq_ids=state.seq_ids[slots],
            slots=slots,
            starts=starts,
            counts=counts,
            drafts=drafts,
            samples=samples,
            prefills=prefills,
            constrained=state.constrained[slots],
            floors=np.where(prefills, state.floors[slots], 0).astype(np.int32),
            write_floors=state.write_floors[slots],
            slack=state.slack[slots],
            cascades=self._cascades.find(decodes, prompts, self.cache.pages, self._running.changes),
            admitted=tuple(admitted),
            preempted=tuple(self._preempted),
            finished=tuple(self._finished),
            ahead=ahead,
        )
        self._preempted, self._finished = [], []
        self.cache.place_windows(slots, starts - plan.slack, ends, ends - drafts - plan.slack)
        state.launch(plan)
        self._flights.append((plan, self._running.in_slots(slots)))
        return plan

    # --- results ---------------------------------------------------------------------------------------------

    def _take_tokens(
        self,
        plan: StepPlan,
        sequences: list[Sequence],
        token_ids: np.ndarray,
        num_tokens: np.ndarray,
        stops: np.ndarray | None,
    ) -> list[Sequence]:
        """Append each row's tokens; return the sequences that are complete with them."""
        append_tokens(sequences, token_ids, num_tokens)
        here = self.state.seq_ids[plan.slots] == plan.seq_ids
        self.state.take(plan, here & plan.samples, num_tokens)
        # Preempted sequences have no numbers in `state`: they are looked at one by one.
        ends = ~here | (self.state.length[plan.slots] >= self.state.limit[plan.slots])
        if stops is not None:
            ends |= stops
        done = []
        for row in np.flatnonzero(ends & (num_tokens > 0)).tolist():
            seq = sequences[row]
            stopped = stops is not None and bool(stops[row])
            if seq.status is not Status.FINISHED and (stopped or len(seq.tokens) >= last_length(seq, self.config)):
                done.append(seq)
        return done

    # --- coming and going ------------------------------------------------------------------------------------

    @property
    def _patience_ends(self) -> int:
        """Who arrived before this step has waited long enough."""
        return self._step - self.config.max_wait_steps if self.config.max_wait_steps else -1

    def _expect(self, seq: Sequence) -> None:
        if self.cache.wants_future:
            seq.hashes = self.cache.hash_tokens(seq.tokens, seq.salt, seq.hashes)
            self.cache.expect(seq.hashes, seq.order)

    def _finish(self, seq: Sequence) -> None:
        if seq.status is Status.RUNNING:
            self._vacate(seq)
        else:
            self._waiting.forget()
            self.cache.meet(seq.hashes, seq.order)
        seq.status = Status.FINISHED
        del self._sequences[seq.seq_id]
        self._finished.append(seq.seq_id)

    def _preempt(self, seq: Sequence) -> None:
        self._vacate(seq)
        seq.status = Status.WAITING
        seq.preemptions += 1
        seq.promoted |= seq.arrived < self._patience_ends  # or those that waited meanwhile would all pass it
        self._preempted.append(seq.seq_id)
        self._waiting.push(seq)
        self._expect(seq)

    def _vacate(self, seq: Sequence) -> None:
        """Give back slot and blocks behind the last step that has a row of the sequence."""
        slot = seq.slot
        self._prefixes.leave(seq)
        self.cache.free(slot, fence=int(self.state.last_step[slot]))
        self._running.close(seq, self._applied)
