"""Window pools: no plan within its budget finds them empty, and nothing is let go of while a step reads it."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from deepinfer_cache import CacheConfig, CacheGroup, CacheManager, integrity
from deepinfer_cache.hit import Hit
from hypothesis import given, settings
from hypothesis import strategies as st

SLOTS, LONGEST = 4, 200


class Load:
    """Sequences that take, prefill, verify, sit out and leave as the test says; plans obey the token budget."""

    def __init__(self, block: int, window: int, budget: int, in_flight: int) -> None:
        groups = (CacheGroup("kv", "prefix", 16), CacheGroup("swa", "window", block, window=window))
        self.cache = CacheManager(
            CacheConfig(
                groups, 64, SLOTS, LONGEST, max_tokens_per_step=budget, max_in_flight=in_flight,
                strategy="exact",
            )
        )  # fmt: skip
        self.blocks = self.cache._windows["swa"]
        self.window, self.budget, self.in_flight = window, budget, in_flight
        self.done: dict[int, int] = {}  # slot -> position of its next row
        self.last: dict[int, int] = {}  # slot -> last step with a row of it
        self.flights: deque[int] = deque()
        self.step = 0

    def admit(self, slot: int, start: int) -> None:
        assert self.cache.allocate(slot, 1, Hit(start=start, window_start=start))
        self.done[slot] = start

    def leave(self, slot: int) -> None:
        del self.done[slot]
        self.cache.free(slot, fence=self.last.pop(slot, self.step))

    def launch(self, wanted: dict[int, tuple[int, int]]) -> None:
        """One step; `wanted` is {slot: (rows, drafts among them that are rejected)}."""
        if len(self.flights) == self.in_flight:
            self.cache.complete(self.flights.popleft())
        left, rows = self.budget, []
        for slot, (count, drafts) in wanted.items():
            count = min(count, left, LONGEST - self.done[slot])
            if count > 0:
                rows.append((slot, self.done[slot], self.done[slot] + count, min(drafts, count - 1)))
                left -= count
        self.step += 1
        self.cache.begin(self.step)
        slots, starts, ends, drafts = np.array(rows, np.int64).reshape(-1, 4).T
        self.cache.place_windows(slots, starts, ends, ends - drafts)
        self.flights.append(self.step)
        size = self.blocks.group.block_size
        for slot, start, end, rejected in rows:
            assert (self.blocks.table[slot, start // size : -(-end // size)] > 0).all(), f"slot {slot} lacks a place"
            self.done[slot], self.last[slot] = end - rejected, self.step


ROWS = st.tuples(st.integers(0, 70), st.integers(0, 4))


@settings(max_examples=40, deadline=None)
@given(st.data())
@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_any_plan_within_the_budget_finds_blocks(in_flight: int, data: st.DataObject) -> None:
    block, window = data.draw(st.sampled_from([1, 3, 4, 16])), data.draw(st.integers(1, 20))
    load = Load(block, window, data.draw(st.integers(SLOTS, 64)), in_flight)
    for _ in range(data.draw(st.integers(1, 15))):
        for slot in range(SLOTS):
            if slot in load.done and (load.done[slot] == LONGEST or data.draw(st.integers(0, 5)) == 0):
                load.leave(slot)
            if slot not in load.done:
                load.admit(slot, data.draw(st.integers(0, 50)))
        load.launch({slot: data.draw(ROWS) for slot in data.draw(st.permutations(range(SLOTS)))})
        integrity.check(load.cache)


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize(("block", "window", "budget"), [(4, 8, 64), (1, 8, 24), (16, 128, 100)])
def test_whole_budget_goes_to_another_sequence_every_step(block: int, window: int, budget: int, in_flight: int) -> None:
    """Each step one sequence computes all it may and the others wait with their windows: the pool's tightest hour."""
    load = Load(block, window, budget, in_flight)
    for turn in range(30):
        slot = turn % SLOTS
        if load.done.get(slot, LONGEST) + budget > LONGEST:
            if slot in load.done:
                load.leave(slot)
            load.admit(slot, turn % (2 * block))
        load.launch({slot: (budget, 0)})
        integrity.check(load.cache)


def test_plan_beyond_the_budget_is_named() -> None:
    load = Load(4, 8, 8, 1)
    load.admit(0, 0)
    load.budget = LONGEST
    with pytest.raises(AssertionError, match="max_tokens_per_step"):
        load.launch({0: (LONGEST, 0)})
