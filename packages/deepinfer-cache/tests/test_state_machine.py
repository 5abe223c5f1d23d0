"""Random life of a cache against a model of the memory: what is read is what was written for that very prefix.

The model executes steps when they are launched and remembers, until they are complete, which blocks they read. Five
bugs are planted one at a time; each must be found.
"""

from __future__ import annotations

from collections import deque
from unittest.mock import patch

import numpy as np
import pytest
from deepinfer_cache import CacheConfig, CacheGroup, CacheManager, IntegrityError, integrity
from deepinfer_cache.pool import PagePool
from deepinfer_cache.window import WindowBlocks
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

PAGE, WINDOW, SLOTS, LONGEST, CHUNK = 2, 4, 3, 18, 5


class Life(RuleBasedStateMachine):
    """Sequences of few tokens over a small alphabet, so that prefixes meet often and memory is always short."""

    @initialize(
        eviction=st.sampled_from(["lru", "next-use"]),
        strategy=st.sampled_from(["bounded", "exact", "full", "periodic(4)"]),
    )
    def start(self, eviction, strategy):
        groups = (CacheGroup("kv", "prefix", PAGE), CacheGroup("swa", "window", 1, window=WINDOW))
        self.cache = CacheManager(
            CacheConfig(
                groups, 14, SLOTS, LONGEST, max_tokens_per_step=SLOTS * CHUNK, max_in_flight=3,
                eviction=eviction, strategy=strategy, max_checkpoints=2,
            )
        )  # fmt: skip
        self.memory = {}  # (group, block, offset) -> the prefix that this entry was computed from
        self.flights = deque()  # (step, reads: block -> sequence)
        self.sequences = {}  # slot -> [name, tokens, computed, hit, last step]
        self.busy = {}  # slot -> the last step of the sequence that had it
        self.step = self.names = self.queries = self.asked = self.found = 0

    # --- rules -------------------------------------------------------------------------------------------------

    @rule(base=st.integers(0, 2), tail=st.lists(st.integers(0, 1), max_size=6), shared=st.integers(1, 8))
    def admit(self, base, tail, shared):
        slot = next((s for s in range(SLOTS) if s not in self.sequences and s not in self.busy), None)
        if slot is None:
            return
        tokens = [base] * shared + tail
        hashes = self.cache.hash_tokens(tokens)
        hit = self.cache.match(hashes, len(tokens))
        if not self.cache.allocate(slot, len(tokens), hit):
            return
        self.names += 1
        self.queries, self.asked, self.found = self.queries + 1, self.asked + len(tokens), self.found + hit.length
        assert hit.start < len(tokens), "nothing is left to compute, so nothing can be sampled"
        for group, block, offset, position in self.entries(slot, 0, hit.length):
            if group == "kv":
                assert self.memory.get((group, block, offset)) == tuple(tokens[: position + 1]), "a hit without content"
        self.sequences[slot] = [self.names, tokens, hit.start, hit, 0]

    @precondition(lambda self: len(self.flights) < 3)
    @rule(chunks=st.lists(st.integers(0, CHUNK), min_size=SLOTS, max_size=SLOTS))
    def launch(self, chunks):
        self.cache.begin(self.step + 1)
        rows = []
        for slot, seq in self.sequences.items():
            _, tokens, computed, _, _ = seq
            end = min(len(tokens), computed + chunks[slot])
            if end > computed and self.cache.allocate(slot, end):
                rows.append((slot, computed, end))
                self.cache.commit(slot, self.cache.hash_tokens(tokens), end)
        if not rows:
            return
        self.step += 1
        slots, starts, ends = np.array(rows).T
        self.cache.place_windows(slots, starts, ends)
        for slot, start, end in rows:
            self.write(slot, start, end)
        self.flights.append((self.step, {}))
        for slot, start, end in rows:
            self.read(slot, start, end)
            self.sequences[slot][2], self.sequences[slot][4] = end, self.step

    @precondition(lambda self: self.flights)
    @rule()
    def complete(self):
        step, _ = self.flights.popleft()
        self.cache.complete(step)
        self.busy = {slot: last for slot, last in self.busy.items() if last > step}

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, SLOTS - 1), token=st.integers(0, 1))
    def append(self, which, token):
        seq = self.sequences.get(which)
        if seq and seq[2] == len(seq[1]) < LONGEST:
            seq[1] = [*seq[1], token]

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, SLOTS - 1))
    def free(self, which):
        """Finish, abort and preempt are the same to a cache: the slot goes, steps in flight go on reading."""
        seq = self.sequences.pop(which, None)
        if seq:
            self.cache.free(which, fence=seq[4])
            if self.flights and seq[4] >= self.flights[0][0]:
                self.busy[which] = seq[4]

    @rule(base=st.integers(0, 2), length=st.integers(2, 8), position=st.integers(0, 30))
    def expect(self, base, length, position):
        hashes = self.cache.hash_tokens([base] * length)
        self.cache.expect(hashes, position)
        if position % 2:
            self.cache.meet(hashes, position)

    # --- the memory --------------------------------------------------------------------------------------------

    def entries(self, slot, first, last):
        """(group, block, offset, position) of positions [first, last)."""
        kv, swa = self.cache.block_table("kv")[slot], self.cache.block_table("swa")[slot]
        for position in range(first, last):
            yield "kv", int(kv[position // PAGE]), position % PAGE, position
            if position < len(swa):
                yield "swa", int(swa[position]), 0, position

    def write(self, slot, start, end):
        name, tokens, _, hit, _ = self.sequences[slot]
        for group, block, offset, position in self.entries(slot, start, end):
            if group == "kv" and position < hit.write_floor:
                continue
            if group == "swa" and self.cache.config.strategy == "full" and position < hit.write_floor:
                continue
            assert block, f"{group}: position {position} has no place"
            for step, reads in self.flights:
                reader = reads.get((group, block), name)
                assert reader == name, f"{group} block {block} is written while step {step} reads it"
            self.memory[group, block, offset] = tuple(tokens[: position + 1])

    def read(self, slot, start, end):
        name, tokens, _, hit, _ = self.sequences[slot]
        reads = self.flights[-1][1]
        low = max(hit.replay_start, start - WINDOW + 1)
        for group, block, offset, position in self.entries(slot, 0, end):
            if group == "swa" and position < low:
                continue
            assert block, f"{group}: position {position} is read and has no block"
            found = self.memory.get((group, block, offset))
            assert found == tuple(tokens[: position + 1]), f"{group}: position {position} reads {found}"
            reads[group, block] = name if reads.get((group, block), name) == name else -1

    # --- always ------------------------------------------------------------------------------------------------

    def check_invariants(self, *args, **kwargs):
        super().check_invariants(*args, **kwargs)
        if hasattr(self, "cache"):
            integrity.check(self.cache)
            stats = self.cache.stats()
            assert (stats.queries, stats.query_tokens, stats.hit_tokens) == (self.queries, self.asked, self.found)

    def teardown(self):
        if not hasattr(self, "cache"):
            return
        for slot in list(self.sequences):
            self.cache.free(slot, fence=self.sequences[slot][4])
        self.cache.complete(self.step)
        integrity.check(self.cache)
        stats = self.cache.stats()
        assert stats.used_pages == 0, "pages leaked"
        self.cache.reset_prefix_cache()
        assert self.cache.available_pages == stats.pages
        for blocks in self.cache._windows.values():
            assert blocks.used == 0, "window blocks leaked"


def test_life_goes_well():
    """Up to 40,000 steps; the scheduler's machine makes up to 10,000 more."""
    run_state_machine_as_test(
        Life,
        settings=settings(
            max_examples=400,
            stateful_step_count=100,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
        ),
    )


def ignore_fences(original):
    return lambda self, slot, fence=None: original(self, slot, 0)


def forget_one_reference(original):
    def share(self, pages):
        original(self, pages)
        if len(pages) > 1:
            self.refs[pages[0]] -= self.refs[pages[0]] > 1

    return share


def keep_evicted_in_the_index(original):
    def evict(self):
        index = dict(self.index)
        page = original(self)
        self.index = index
        return page

    return evict


def publish_unfilled_pages(original):
    return lambda self, slot, hashes, num_tokens, tokens=None: original(
        self, slot, hashes, num_tokens + PAGE - 1, tokens
    )


def let_go_of_windows_too_early(original):
    return lambda self, slots, starts, ends, nexts, fence: original(self, slots, starts, ends, nexts, -1)


PLANTED = [
    (CacheManager, "free", ignore_fences),
    (PagePool, "share", forget_one_reference),
    (PagePool, "_evict", keep_evicted_in_the_index),
    (CacheManager, "commit", publish_unfilled_pages),
    (WindowBlocks, "place", let_go_of_windows_too_early),
]


@pytest.mark.parametrize(("owner", "method", "bug"), PLANTED, ids=[bug.__name__ for _, _, bug in PLANTED])
def test_planted_bugs_are_found(owner, method, bug):
    quick = settings(
        max_examples=400, stateful_step_count=60, deadline=None, phases=[Phase.generate], derandomize=True,
        suppress_health_check=list(HealthCheck), database=None,
    )  # fmt: skip
    with patch.object(owner, method, bug(getattr(owner, method))), pytest.raises((AssertionError, IntegrityError)):
        run_state_machine_as_test(Life, settings=quick)
