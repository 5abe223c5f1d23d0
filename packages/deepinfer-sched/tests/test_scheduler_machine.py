"""Random jobs through a scheduler and a cache, one or two steps ahead, against a model of the memory.

The model's "network" is a function of the whole prefix, read out of paged memory: any mistake about blocks, positions,
placeholders or late results changes a token or reads something that was never written. Bugs are planted one at a
time; each must be found.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from deepinfer_sched import DraftsAhead, SchedConfig, Scheduler, Sequence, Status
from deepinfer_sched.cascade import CascadeFinder
from deepinfer_sched.prefixes import PrefixWork
from deepinfer_sched.running import RunningSet
from deepinfer_sched.slots import SlotState
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

deepinfer_cache = pytest.importorskip("deepinfer_cache")
PartialIndex = pytest.importorskip("deepinfer_cache.partial").PartialIndex
PAGE, SLOTS, LONGEST, BUDGET, AHEAD = 3, 3, 24, 6, 3
STOP = 0


def next_token(prefix):
    """The network: a token in 0 .. 6 that depends on every token before it; 0 ends a sequence."""
    return zlib.crc32(bytes(prefix)) % 7


def answer(prompt, max_tokens):
    """What one sequence alone would say."""
    tokens = list(prompt)
    for _ in range(min(max_tokens, LONGEST - len(prompt))):
        tokens.append(next_token(tokens))
        if tokens[-1] == STOP:
            break
    return tokens


class Jobs(RuleBasedStateMachine):
    """Few slots, little memory and short prompts that often agree."""

    @initialize(
        pages=st.integers(9, 14),
        share=st.booleans(),
        ahead=st.booleans(),
        eviction=st.sampled_from(["lru", "next-use"]),
        window=st.booleans(),
        partial=st.booleans(),
    )
    def start(self, pages, share, ahead, eviction, window, partial):
        groups = [deepinfer_cache.CacheGroup("kv", "prefix", PAGE)]
        if window:
            groups.append(deepinfer_cache.CacheGroup("swa", "window", 1, window=4))
        config = deepinfer_cache.CacheConfig(
            tuple(groups),
            pages,
            SLOTS,
            LONGEST,
            max_tokens_per_step=BUDGET + SLOTS * 3,  # rows that may verify drafts reach farther than a step computes
            max_in_flight=AHEAD,
            eviction=eviction,
            partial_hits=partial,
        )
        self.cache = deepinfer_cache.CacheManager(config, mover=self)
        limits = SchedConfig(
            SLOTS, BUDGET, LONGEST, AHEAD, share_in_step=share, constrained_ahead=ahead, max_wait_steps=5,
            cascade_min_tokens=PAGE,
        )  # fmt: skip
        self.scheduler = Scheduler(limits, self.cache)
        self.memory = {}  # (block, offset) -> prefix
        self.buffer = {}  # slot -> ids as the device knows them
        self.flights = deque()  # (plan, ids, counts, stops, reads: block -> sequence)
        self.expected = {}  # sequence id -> Sequence, its whole text
        self.drafts = {}  # sequence id -> draft ids that the next row verifies
        self.applied = 0

    @rule(
        base=st.integers(1, 2), shared=st.integers(1, 12), tail=st.lists(st.integers(1, 6), max_size=3),
        max_tokens=st.integers(1, 9), priority=st.integers(0, 2), copies=st.integers(1, 3), constrained=st.booleans(),
        read_cache=st.booleans(),
    )  # fmt: skip
    def add(self, base, shared, tail, max_tokens, priority, copies, constrained, read_cache):
        prompt = [base] * shared + tail
        for _ in range(copies):
            seq = Sequence(
                len(self.expected), list(prompt), max_tokens, priority, constrained=constrained, read_cache=read_cache
            )
            self.expected[seq.seq_id] = (seq, answer(prompt, max_tokens))
            self.scheduler.add(seq)

    @precondition(lambda self: self.flights or self.scheduler.has_unfinished)
    @rule(share=st.one_of(st.none(), st.floats(0, 1)), width=st.integers(0, 3))
    def launch(self, share=None, width=0):
        """Plan a step; with a `share` drafts are made by the step itself, and that share of those it may verify is."""
        ahead = None
        if share is not None:
            ahead = DraftsAhead(width, lambda step, slots, most, room: int(share * most.sum()))
        plan = self.scheduler.plan(ahead)
        if plan is None:
            assert self.flights or not self.scheduler.has_unfinished, "nothing is in flight and nothing can be planned"
            return
        assert plan.num_tokens <= BUDGET
        assert len(set(plan.slots.tolist())) == plan.num_rows
        for seq_id in plan.admitted:
            seq = self.scheduler.sequence(seq_id)
            assert seq.slot not in {slot for flight in self.flights for slot in flight[0].slots.tolist()}
            self.buffer[seq.slot] = list(seq.tokens)
        self.flights.append(self.execute(plan))

    @precondition(lambda self: self.flights)
    @rule()
    def apply(self):
        plan, ids, counts, stops, _ = self.flights.popleft()
        for seq in self.scheduler.apply(plan, ids, counts, stops):
            assert seq.tokens == self.expected[seq.seq_id][1], "another answer than the sequence alone would give"
        self.applied = plan.step
        deepinfer_cache.integrity.check(self.cache)

    @precondition(lambda self: self.expected)
    @rule(
        which=st.integers(0, 30),
        what=st.sampled_from(["abort", "preempt", "propose", "propose"]),
        good=st.integers(0, 2),
    )
    def disturb(self, which, what, good):
        seq, _ = self.expected[which % len(self.expected)]
        if seq.status is Status.FINISHED:
            return
        if what == "abort":
            self.scheduler.abort(seq.seq_id)
        elif seq.status is Status.RUNNING and what == "preempt":
            self.scheduler.preempt(seq.seq_id)
        elif seq.status is Status.RUNNING:
            self.drafts[seq.seq_id] = good
            if self.scheduler.state.pending[seq.slot]:
                return  # only what a step drafts itself may follow tokens in flight
            self.scheduler.propose(seq.seq_id, 3)

    # --- the device --------------------------------------------------------------------------------------------

    def true_rows(self, plan):
        """The plan as the device carries it out: where rows start, and how many drafts each one verifies."""
        if plan.ahead is None:
            assert not plan.slack.any()
            return plan
        starts, drafts, left = plan.starts.copy(), np.zeros_like(plan.drafts), plan.ahead.budget
        for row in np.argsort([zlib.crc32(bytes([plan.step % 256, row])) for row in range(plan.num_rows)]).tolist():
            if not plan.prefills[row]:
                starts[row] = len(self.buffer[int(plan.slots[row])]) - 1
                assert plan.starts[row] - plan.slack[row] <= starts[row] <= plan.starts[row]
            drafts[row] = min(left, plan.drafts[row])
            left -= drafts[row]
        assert not left
        counts = np.where(plan.prefills, plan.counts, 1 + drafts)
        assert counts.sum() == plan.num_tokens
        return replace(plan, starts=starts, drafts=drafts, counts=counts)

    def execute(self, planned):
        plan = self.true_rows(planned)
        ids, counts, stops = (
            np.zeros((plan.num_rows, 4), int),
            np.zeros(plan.num_rows, int),
            np.zeros(plan.num_rows, bool),
        )
        reads = {}
        for row in range(plan.num_rows):
            self.put_drafts(plan, row)
            self.write(plan, row)
        for row in range(plan.num_rows):
            self.read(plan, row, reads)
            if plan.samples[row]:
                sampled = self.sample(plan, row)
                ids[row, : len(sampled)], counts[row], stops[row] = sampled, len(sampled), sampled[-1] == STOP
        for cascade in plan.cascades:
            tables = self.cache.pages[plan.slots[cascade.rows], : cascade.blocks]
            assert (tables == tables[0]).all()
            assert tables.all()
            assert not plan.prefills[cascade.rows].any()
            assert (plan.starts[cascade.rows] >= cascade.tokens).all()
        return planned, ids, counts, stops, reads

    def copy(self, sources, targets):
        """The mover: copies happen after every step launched so far and before the one that is being planned."""
        for source, target in zip(sources, targets, strict=True):
            for flight in self.flights:
                assert target not in flight[4], f"block {target} is overwritten while a step reads it"
            for offset in range(PAGE):
                self.memory[target, offset] = self.memory.get((source, offset))

    def put_drafts(self, plan, row):
        count = int(plan.drafts[row])
        if count:
            buffer, start = self.buffer[int(plan.slots[row])], int(plan.starts[row])
            good = self.drafts.get(int(plan.seq_ids[row]), 1)
            del buffer[start + 1 :]
            for place in range(count):
                token = next_token(buffer)
                buffer.append(token if place < good else (token + 1) % 7)

    def entries(self, plan, row, first):
        slot, start, count = int(plan.slots[row]), int(plan.starts[row]), int(plan.counts[row])
        table = self.cache.block_table("kv")[slot]
        return [(int(table[p // PAGE]), p % PAGE, p) for p in range(start if first is None else first, start + count)]

    def write(self, plan, row):
        tokens, seq_id = self.buffer[int(plan.slots[row])], int(plan.seq_ids[row])
        for block, offset, position in self.entries(plan, row, None):
            if position >= plan.write_floors[row]:
                assert block, f"position {position} has no place"
                for flight in self.flights:
                    assert flight[4].get(block, seq_id) == seq_id, f"block {block} is written while a step reads it"
                self.memory[block, offset] = tuple(tokens[: position + 1])

    def read(self, plan, row, reads):
        tokens = self.buffer[int(plan.slots[row])]
        end = int(plan.starts[row] + plan.counts[row])
        assert end <= len(tokens), f"position {end - 1} is computed before its token exists"
        for block, offset, position in self.entries(plan, row, 0):
            assert self.memory.get((block, offset)) == tuple(tokens[: position + 1]), f"position {position}"
            seq_id = int(plan.seq_ids[row])
            reads[block] = seq_id if reads.get(block, seq_id) == seq_id else -1

    def sample(self, plan, row):
        """Tokens drawn after each position of the row, up to the first that disagrees with a draft."""
        buffer = self.buffer[int(plan.slots[row])]
        end = int(plan.starts[row] + plan.counts[row])
        first = end - int(plan.drafts[row])
        sampled = []
        for position in range(first, end + 1):
            sampled.append(next_token(buffer[:position]))
            if sampled[-1] == STOP or position == end or buffer[position] != sampled[-1]:
                break
        del buffer[first:]
        buffer.extend(sampled)
        return sampled

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        while self.flights or self.scheduler.has_unfinished:
            before = self.applied
            for _ in range(AHEAD):
                self.launch()
            if self.flights:
                self.apply()
            assert self.applied > before, "no progress"
        assert all(seq.status is Status.FINISHED for seq, _ in self.expected.values())
        deepinfer_cache.integrity.check(self.cache)
        assert self.cache.stats().used_pages == 0, "pages leaked"


def test_every_job_gets_its_answers():
    """Up to 10,000 steps; the cache's machine makes up to 40,000 more."""
    run_state_machine_as_test(
        Jobs,
        settings=settings(
            max_examples=100,
            stateful_step_count=100,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
        ),
    )


def reuse_slots_at_once(original):
    return lambda self, seq, applied: original(self, seq, 10**9)


def keep_rejected_drafts(original):
    def take(self, plan, rows, num_tokens):
        computed = self.computed.copy()
        original(self, plan, rows, num_tokens)
        self.computed[:] = np.maximum(computed, self.computed)

    return take


def forget_placeholders(original):
    def launch(self, plan):
        original(self, plan)
        self.pending[plan.slots] -= (plan.drafts == 0) & plan.samples & (plan.step % 7 == 0)

    return launch


def publish_whole_prompts_at_once(original):
    return lambda self, seq, end: original(self, seq, len(seq.tokens))


def keep_old_cascades(original):
    return lambda self, slots, prompts, pages, changes: original(self, slots, prompts, pages, 0)


def forget_the_last_step(original):
    return lambda self, plan: original(self, replace(plan, step=plan.step - 1))


def forget_drafts_in_flight(original):
    def launch(self, plan):
        original(self, plan)
        self.slack[plan.slots] = plan.drafts

    return launch


def start_rows_where_they_may_start(original):
    """The lowest position instead of the highest: what a row may reach beyond it has no room."""

    def take(self, plan, rows, num_tokens):
        original(self, plan, rows, num_tokens)
        self.computed[plan.slots[rows]] -= self.slack[plan.slots[rows]]

    return take


def copy_pages_that_are_not_filled_yet(original):
    return lambda self, parent, tokens, step: original(self, parent, tokens, 10**9)


PLANTED = [
    (RunningSet, "close", reuse_slots_at_once),
    (SlotState, "take", keep_rejected_drafts),
    (SlotState, "launch", forget_placeholders),
    (PrefixWork, "commit_prompt", publish_whole_prompts_at_once),
    (CascadeFinder, "find", keep_old_cascades),
    (SlotState, "launch", forget_the_last_step),
    (SlotState, "launch", forget_drafts_in_flight),
    (SlotState, "take", start_rows_where_they_may_start),
    (PartialIndex, "find", copy_pages_that_are_not_filled_yet),
]


@pytest.mark.parametrize(("owner", "method", "bug"), PLANTED, ids=[bug.__name__ for _, _, bug in PLANTED])
def test_planted_bugs_are_found(owner, method, bug):
    quick = settings(
        max_examples=200, stateful_step_count=60, deadline=None, phases=[Phase.generate], derandomize=True,
        suppress_health_check=list(HealthCheck), database=None,
    )  # fmt: skip
    found = (AssertionError, deepinfer_cache.IntegrityError, KeyError, IndexError, ValueError)
    with patch.object(owner, method, bug(getattr(owner, method))), pytest.raises(found):
        run_state_machine_as_test(Jobs, settings=quick)
