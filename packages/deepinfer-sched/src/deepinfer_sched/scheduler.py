"""Which sequences run in the next step, and what each computes."""

from __future__ import annotations

from bisect import insort
from collections import deque

import numpy as np

from deepinfer_sched.cache import Cache, Hit
from deepinfer_sched.cascade import find_shared_prefixes
from deepinfer_sched.config import SchedConfig
from deepinfer_sched.errors import SchedError, SequenceError
from deepinfer_sched.sequence import Sequence, Status
from deepinfer_sched.slots import SlotState
from deepinfer_sched.step import Cascade, StepPlan
from deepinfer_sched.waiting import WaitingQueue

_EMPTY = np.zeros(0, np.int32)


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
        self.state = SlotState(config.max_running)
        self._sequences: dict[int, Sequence] = {}
        self._waiting = WaitingQueue()
        self._running: list[Sequence] = []  # by rank
        self._slots = _EMPTY  # slots of `_running`, in the same order
        self._free_slots = list(range(config.max_running - 1, -1, -1))
        self._fenced_slots: deque[tuple[int, int]] = deque()  # (last step that has a row of it, slot)
        self._flights: deque[tuple[StepPlan, list[Sequence]]] = deque()
        self._computing: dict[bytes, int] = {}  # page key -> sequence whose prefill will fill that page
        self._step = 0
        self._applied = 0
        self._orders = 0
        self._preempted: list[int] = []
        self._finished: list[int] = []
        self._by_slot: list[Sequence] = [None] * config.max_running  # type: ignore[list-item]
        self._epoch = 0  # changes whenever a slot changes hands
        self._cascade_key = b""
        self._cascades: tuple[Cascade, ...] = ()

    # --- requests --------------------------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Queue a sequence.

        Raises:
            SequenceError: it is known already, or it can never run within the limits; nothing was queued.
        """
        if seq.seq_id in self._sequences:
            raise SequenceError(f"sequence {seq.seq_id} is already known")
        if not seq.tokens or seq.max_tokens < 1:
            raise SequenceError(
                f"sequence {seq.seq_id}: {len(seq.tokens)} prompt tokens and max_tokens {seq.max_tokens}; both must be at least 1"
            )
        if len(seq.tokens) >= self.config.max_model_len:
            raise SequenceError(
                f"sequence {seq.seq_id}: a prompt of {len(seq.tokens)} tokens leaves no room to answer within "
                f"max_model_len {self.config.max_model_len}"
            )
        capacity = self.cache.num_pages
        if self.cache.pages_for(self._limit(seq)) > capacity:
            raise SequenceError(
                f"sequence {seq.seq_id}: up to {self._limit(seq)} tokens do not fit the cache of "
                f"{capacity * self.cache.page_size} tokens"
            )
        seq.order = self._orders
        self._orders += 1
        self._sequences[seq.seq_id] = seq
        self._waiting.push(seq)

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
        """The next row of a sequence verifies up to `drafts` draft tokens (the token budget may grant fewer)."""
        seq = self.sequence(seq_id)
        if seq.status is Status.RUNNING:
            self.state.drafts[seq.slot] = drafts

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

    # --- a step ----------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """Plan the next step. Decode rows come first, then running prefills, then admissions.

        Returns:
            None when nothing can be planned now: apply a step in flight first, or there is no work.
        """
        if len(self._flights) >= self.config.max_in_flight:
            return None
        step = self._step + 1
        self.cache.begin(step)
        decodes, counts = self._plan_decodes()
        budget = self.config.max_tokens_per_step - int(counts.sum())
        prefills: list[tuple[Sequence, int]] = []
        budget = self._continue_prefills(prefills, budget)
        admitted = self._admit(prefills, budget)
        if not len(decodes) and not prefills:
            return None
        self._step = step
        return self._launch(step, decodes, counts, prefills, admitted)

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
        self._commit_generated(plan.slots)
        for seq in done:
            self._finish(seq)
        self.cache.complete(plan.step)
        while self._fenced_slots and self._fenced_slots[0][0] <= self._applied:
            self._free_slots.append(self._fenced_slots.popleft()[1])
        return done

    # --- planning --------------------------------------------------------------------------------------------

    def _plan_decodes(self) -> tuple[np.ndarray, np.ndarray]:
        """Slots that decode or verify, and the tokens of each; room for them is allocated."""
        state, slots = self.state, self._slots
        if not len(slots):
            return _EMPTY, _EMPTY
        length, pending, computed = state.length[slots], state.pending[slots], state.computed[slots]
        ready = (computed >= state.target[slots]) & (length + pending > computed) & ~state.verifying[slots]
        ready &= length + pending < state.limit[slots]
        drafts = state.drafts[slots]
        ready &= (drafts == 0) | (pending == 0)
        if not self.config.constrained_ahead:
            ready &= ~state.constrained[slots] | (pending == 0)
        slots, drafts = slots[ready], drafts[ready]
        if drafts.any():
            room = state.limit[slots] - state.length[slots] - 1
            drafts = np.minimum(drafts, np.maximum(room, 0))
            spare = self.config.max_tokens_per_step - len(slots)
            drafts = np.clip(spare - (np.cumsum(drafts) - drafts), 0, drafts)
        counts = drafts + 1
        return self._make_room(slots, counts.astype(np.int32))

    def _make_room(self, slots: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Allocate for decode rows in rank order, preempting from the last rank; drop rows that found no room."""
        page_size = self.cache.page_size
        ends = self.state.computed[slots] + counts
        short = np.flatnonzero(ends > self.cache.held_pages(slots) * page_size)
        dropped: set[int] = set()
        for row in short.tolist():
            slot = int(slots[row])
            if self.state.seq_ids[slot] < 0:
                continue  # preempted by a row before
            while not self.cache.allocate(slot, int(ends[row])):
                if self.cache.fenced_pages or not self._preempt_last(slot):
                    dropped.add(row)  # room comes with the next result, or the row itself was preempted
                    break
        keep = self.state.seq_ids[slots] >= 0
        keep[list(dropped)] = False
        return slots[keep], counts[keep]

    def _preempt_last(self, slot: int) -> bool:
        """Preempt the sequence of the last rank. False when that is the one in `slot`, i.e. it asked for itself."""
        self._preempt(self._running[-1])
        return bool(self.state.seq_ids[slot] >= 0)

    def _continue_prefills(self, rows: list[tuple[Sequence, int]], budget: int) -> int:
        """Next chunk of each sequence that is still prefilling. Returns what is left of the budget."""
        slots = self._slots
        for index in np.flatnonzero(self.state.computed[slots] < self.state.target[slots]).tolist():
            if budget <= 0:
                break
            seq = self._running[index]
            chunk = min(budget, int(self.state.target[seq.slot] - self.state.computed[seq.slot]))
            rows.append((seq, chunk))
            budget -= chunk
            self._commit_prompt(seq, int(self.state.computed[seq.slot]) + chunk)
        return budget

    def _admit(self, rows: list[tuple[Sequence, int]], budget: int) -> list[int]:
        """Give waiting sequences a slot, in rank order, as long as slots, pages and the budget last."""
        admitted: list[int] = []
        held: list[Sequence] = []
        while budget > 0 and self._free_slots and len(held) <= self.config.lookahead:
            seq = self._waiting.pop()
            if seq is None:
                break
            if seq.last_step > self._applied:  # preempted, and a step in flight still makes its last token
                held.append(seq)
                continue
            seq.hashes = self.cache.hash_tokens(seq.tokens, seq.salt, seq.hashes)
            hit = self.cache.match(seq.hashes if seq.read_cache else [], len(seq.tokens))
            if seq.read_cache and self._is_computing(seq, len(hit.pages)):
                held.append(seq)
                continue
            if not self.cache.can_admit(hit, len(seq.tokens), self.config.reserve_pages * len(self._running)):
                held.append(seq)
                break
            chunk = min(budget, len(seq.tokens) - hit.start)
            self._open(seq, hit)
            rows.append((seq, chunk))
            budget -= chunk
            admitted.append(seq.seq_id)
            self._commit_prompt(seq, hit.start + chunk)
        for seq in held:
            self._waiting.push(seq)
        return admitted

    def _is_computing(self, seq: Sequence, found: int) -> bool:
        """Whether another sequence is about to fill the page that this one misses first."""
        return found < len(seq.hashes) and self._computing.get(seq.hashes[found], seq.seq_id) != seq.seq_id

    def _open(self, seq: Sequence, hit: Hit) -> None:
        seq.slot = self._free_slots.pop()
        opened = self.cache.allocate(seq.slot, len(seq.tokens), hit)
        assert opened, f"sequence {seq.seq_id} was admitted without room"
        self.state.open(seq.slot, seq, self._limit(seq), hit)
        self.state.committed[seq.slot] = len(hit.pages)
        seq.status = Status.RUNNING
        if seq.cached_tokens < 0:
            seq.cached_tokens = min(hit.length, seq.num_prompt)
        for key in seq.hashes[len(hit.pages) :]:
            self._computing.setdefault(key, seq.seq_id)
        self._by_slot[seq.slot] = seq
        self._epoch += 1
        insort(self._running, seq, key=_rank)
        self._slots = np.array([seq.slot for seq in self._running], np.int32)

    def _launch(
        self,
        step: int,
        decodes: np.ndarray,
        counts: np.ndarray,
        prefills: list[tuple[Sequence, int]],
        admitted: list[int],
    ) -> StepPlan:
        state = self.state
        chunks = np.array([chunk for _, chunk in prefills], np.int32)
        slots = np.concatenate([decodes, np.array([seq.slot for seq, _ in prefills], np.int32)])
        counts = np.concatenate([counts, chunks])
        starts = state.computed[slots]
        ends = starts + counts
        is_prefill = np.arange(len(slots)) >= len(decodes)
        samples = ~is_prefill | (ends >= state.target[slots])
        plan = StepPlan(
            step=step,
            seq_ids=state.seq_ids[slots],
            slots=slots,
            starts=starts,
            counts=counts,
            drafts=np.where(is_prefill, 0, counts - 1).astype(np.int32),
            samples=samples,
            prefills=is_prefill,
            constrained=state.constrained[slots],
            floors=np.where(is_prefill, state.floors[slots], 0).astype(np.int32),
            write_floors=state.write_floors[slots],
            cascades=self._find_cascades(decodes),
            admitted=tuple(admitted),
            preempted=tuple(self._preempted),
            finished=tuple(self._finished),
        )
        self._preempted, self._finished = [], []
        self.cache.place_windows(slots, starts, ends)
        state.computed[slots] = ends
        state.pending[slots] += np.where(is_prefill, samples, counts).astype(np.int32)
        state.verifying[slots] = plan.drafts > 0
        state.last_step[slots] = step
        self._flights.append((plan, [self._by_slot[slot] for slot in slots.tolist()]))
        return plan

    def _find_cascades(self, decodes: np.ndarray) -> tuple[Cascade, ...]:
        """Shared prefixes of the decode rows; they only change when the rows change."""
        config = self.config
        if not config.cascade_min_rows or len(decodes) < config.cascade_min_rows:
            return ()
        key = decodes.tobytes() + self._epoch.to_bytes(8, "little")
        if key != self._cascade_key:
            page_size = self.cache.page_size
            full = self.state.target[decodes] // page_size  # sharing ends where the prompt ends
            groups = find_shared_prefixes(
                self.cache.pages[decodes], full, max(1, -(-config.cascade_min_tokens // page_size))
            )
            self._cascades = tuple(
                Cascade(rows.astype(np.int32), pages, pages * page_size)
                for rows, pages in groups
                if len(rows) >= config.cascade_min_rows
            )
            self._cascade_key = key
        return self._cascades

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
        state = self.state
        first, numbers = token_ids[:, 0].tolist(), num_tokens.tolist()
        for row, (seq, number) in enumerate(zip(sequences, numbers, strict=True)):
            if number and seq.status is not Status.FINISHED:
                if number == 1:
                    seq.tokens.append(first[row])
                else:
                    seq.tokens.extend(token_ids[row, :number].tolist())
        rows = np.flatnonzero((state.seq_ids[plan.slots] == plan.seq_ids) & plan.samples)
        slots, taken = plan.slots[rows], num_tokens[rows]
        state.length[slots] += taken
        verified = plan.drafts[rows] > 0
        state.pending[slots] -= np.where(verified, plan.counts[rows], 1).astype(np.int32)
        state.computed[slots[verified]] = (plan.starts[rows] + taken)[verified]
        state.verifying[slots[verified]] = False
        state.drafts[slots[verified]] = 0
        return self._complete_ones(plan, sequences, num_tokens, stops)

    def _complete_ones(
        self, plan: StepPlan, sequences: list[Sequence], num_tokens: np.ndarray, stops: np.ndarray | None
    ) -> list[Sequence]:
        """Sequences of this step that end by stop or by length, preempted ones included."""
        state = self.state
        here = state.seq_ids[plan.slots] == plan.seq_ids
        ends = np.where(
            here, state.length[plan.slots] >= state.limit[plan.slots], True
        )  # others are looked at one by one
        if stops is not None:
            ends |= stops
        done = []
        for row in np.flatnonzero(ends & (num_tokens > 0)).tolist():
            seq = sequences[row]
            if seq.status is Status.FINISHED:
                continue
            if (stops is not None and stops[row]) or len(seq.tokens) >= self._limit(seq):
                done.append(seq)
        return done

    def _commit_generated(self, slots: np.ndarray) -> None:
        """Make pages findable that were filled with generated tokens; their ids are known only now."""
        state, page_size = self.state, self.cache.page_size
        full = np.minimum(state.computed[slots], state.length[slots]) // page_size
        due = (
            (full > state.committed[slots])
            & (state.seq_ids[slots] >= 0)
            & (state.computed[slots] >= state.target[slots])
        )
        for slot in slots[due].tolist():
            seq = self._by_slot[slot]
            pages = int(min(state.computed[slot], state.length[slot])) // page_size
            seq.hashes = self.cache.hash_tokens(seq.tokens, seq.salt, seq.hashes)
            self.cache.commit(slot, seq.hashes, pages * page_size)
            state.committed[slot] = pages

    def _commit_prompt(self, seq: Sequence, end: int) -> None:
        """Prompt pages below `end` are filled by the step that is being planned."""
        first, last = int(self.state.committed[seq.slot]), min(end // self.cache.page_size, len(seq.hashes))
        if last <= first:
            return
        self.cache.commit(seq.slot, seq.hashes, last * self.cache.page_size)
        self.state.committed[seq.slot] = last
        for key in seq.hashes[first:last]:
            if self._computing.get(key) == seq.seq_id:
                del self._computing[key]

    # --- leaving ---------------------------------------------------------------------------------------------

    def _limit(self, seq: Sequence) -> int:
        return min(seq.num_prompt + seq.max_tokens, self.config.max_model_len)

    def _finish(self, seq: Sequence) -> None:
        if seq.status is Status.RUNNING:
            self._vacate(seq)
        else:
            self._waiting.forget()
        seq.status = Status.FINISHED
        del self._sequences[seq.seq_id]
        self._finished.append(seq.seq_id)

    def _preempt(self, seq: Sequence) -> None:
        self._vacate(seq)
        seq.status = Status.WAITING
        seq.preemptions += 1
        self._preempted.append(seq.seq_id)
        self._waiting.push(seq)

    def _vacate(self, seq: Sequence) -> None:
        """Give back slot and blocks behind the last step that has a row of the sequence."""
        slot = seq.slot
        seq.last_step = int(self.state.last_step[slot])
        for key in seq.hashes[int(self.state.committed[slot]) :]:
            if self._computing.get(key) == seq.seq_id:
                del self._computing[key]
        self.cache.free(slot, fence=seq.last_step)
        self.state.close(slot)
        self._running.remove(seq)
        self._slots = np.array([seq.slot for seq in self._running], np.int32)
        seq.slot = -1
        self._epoch += 1
        if seq.last_step > self._applied:
            self._fenced_slots.append((seq.last_step, slot))
        else:
            self._free_slots.append(slot)


def _rank(seq: Sequence) -> tuple[int, int]:
    return seq.rank
