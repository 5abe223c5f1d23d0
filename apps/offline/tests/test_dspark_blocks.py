"""What calibration is told of a block: how many of its drafts were said, and of how many the fate is known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from deepinfer_offline.engine.native.dspark import DSparkDrafter
from deepinfer_sched.slots import SlotState
from hypothesis import given, settings
from hypothesis import strategies as st

SLOTS, WIDTH = 4, 3

Block = tuple[list[int], int]
"""Tokens, and a number that its logits carry."""


def make_drafter(state: SlotState) -> tuple[DSparkDrafter, list[tuple[int, int, int]]]:
    """A drafter that drafts nothing, and what its calibration is told: (number of the block, right, known)."""
    facts = SimpleNamespace(cache_groups=[SimpleNamespace(name="kv", block_size=16)])
    model = SimpleNamespace(facts=facts, options=SimpleNamespace(device="cpu"), draft_group="kv", draft_width=WIDTH)
    parts: list[Any] = [SimpleNamespace(model=model), SimpleNamespace(state=state), None, None]
    drafter, told = DSparkDrafter(*parts), []

    def observe(logits: np.ndarray, right: np.ndarray, known: np.ndarray) -> None:
        told.extend(zip(logits[:, 0].astype(int).tolist(), right.tolist(), known.tolist(), strict=True))

    drafter.calibration = SimpleNamespace(observe=observe)  # type: ignore[assignment]
    return drafter, told


class Reference:
    """One block a sequence, one token after the other."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int, int]] = []
        self._blocks: dict[int, tuple[Block, int]] = {}

    def guess(self, sequence: int, block: Block) -> None:
        if sequence in self._blocks:
            (_, number), right = self._blocks[sequence]
            self.told.append((number, right, right))
        self._blocks[sequence] = block, 0

    def say(self, sequence: int, tokens: list[int]) -> None:
        for token in tokens:
            if sequence not in self._blocks:
                return
            (drafts, number), right = self._blocks[sequence]
            if right == WIDTH or drafts[right] != token:
                self.told.append((number, right, WIDTH))
                del self._blocks[sequence]
            else:
                self._blocks[sequence] = (drafts, number), right + 1


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_blocks_are_settled_by_what_sequences_say(data: st.DataObject) -> None:
    """Any order of blocks and steps, steps of some rows in any order, up to a token more than a block: as token by token."""
    state = SlotState(SLOTS)
    state.seq_ids[:] = data.draw(st.permutations(range(10, 10 + SLOTS)))
    state.length[:] = 5
    drafter, told = make_drafter(state)
    reference, number = Reference(), 0
    rows_of = st.lists(st.sampled_from(range(SLOTS)), min_size=1, unique=True)
    for _ in range(data.draw(st.integers(1, 12))):
        slots = np.array(data.draw(rows_of))
        names = state.seq_ids[slots]
        if data.draw(st.booleans()):
            tokens = [data.draw(st.lists(st.integers(0, 1), min_size=WIDTH, max_size=WIDTH)) for _ in slots]
            numbers = np.arange(number, number + len(slots))
            drafter.guess(names.tolist(), np.array(tokens), np.repeat(numbers[:, None], WIDTH, axis=1))
            for name, block, own in zip(names.tolist(), tokens, numbers.tolist(), strict=True):
                reference.guess(name, (block, own))
            number += len(slots)
        else:
            width = data.draw(st.integers(1, WIDTH + 2))
            said = [data.draw(st.lists(st.integers(0, 1), max_size=width)) for _ in slots]
            ids = np.array([tokens + [-1] * (width - len(tokens)) for tokens in said], np.int32)
            counts = np.array([len(tokens) for tokens in said], np.int32)
            state.length[slots] += counts
            plan = SimpleNamespace(slots=slots, seq_ids=names)
            drafter.hear(SimpleNamespace(plan=plan, token_ids=ids, num_tokens=counts))  # type: ignore[arg-type]
            for name, tokens in zip(names.tolist(), said, strict=True):
                reference.say(name, tokens)
    everyone = state.seq_ids.tolist()
    drafter.guess(everyone, np.zeros((SLOTS, WIDTH), int), np.full((SLOTS, WIDTH), -1))
    for name in everyone:
        reference.guess(name, ([0] * WIDTH, -1))
    assert sorted(told) == sorted(reference.told)


def test_what_was_said_in_another_slot_settles_nothing() -> None:
    """A sequence that was preempted, ran elsewhere, and came back: its old block is known as far as it was heard."""
    state = SlotState(SLOTS)
    state.seq_ids[:], state.length[:] = range(SLOTS), 5
    drafter, told = make_drafter(state)
    drafter.guess([0], np.array([[7, 8, 9]]), np.full((1, WIDTH), 1))
    state.length[0] = 8  # two tokens that it said elsewhere, and the one that is heard
    plan = SimpleNamespace(slots=np.array([0]), seq_ids=np.array([0]))
    drafter.hear(SimpleNamespace(plan=plan, token_ids=np.array([[7]]), num_tokens=np.array([1])))  # type: ignore[arg-type]
    drafter.guess([0], np.array([[7, 8, 9]]), np.full((1, WIDTH), 2))
    assert told == [(1, 0, 0)]
