"""Draws of rows that only the device knows are those of `Sampler` at the same places, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from deepinfer_offline.sampling import Sampler, SamplingBatch, SamplingParams, SamplingTable, device_draws
from deepinfer_offline.sampling.device_rows import DeviceRows
from hypothesis import given, settings
from hypothesis import strategies as st

SLOTS, LENGTH = 6, 40

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.4]),
    top_k=st.sampled_from([0, 0, 3, 20]),
    top_p=st.sampled_from([1.0, 0.6, 0.95]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.4]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    min_tokens=st.sampled_from([0, 4]),
    logprobs=st.sampled_from([None, None, 2]),
    logit_bias=st.sampled_from([None, {3: 4.0, 7: -100.0}, {1: 2.0}]),
    max_tokens=st.just(64),
)


def table_of(params: list[SamplingParams], vocab: int) -> SamplingTable:
    table = SamplingTable(SLOTS)
    for slot, one in enumerate(params):
        stops = [[2, 5], [9], []][slot % 3]
        table.write(slot, one, seed=100 + slot, prompt_len=6 + slot, stop_ids=stops, vocab_size=vocab)
    return table


@pytest.mark.parametrize(("vocab", "examples"), [(32, 150), (5000, 12)])
@pytest.mark.parametrize("exact", [False, True])
def test_draws_are_the_samplers(vocab: int, examples: int, exact: bool) -> None:
    """5000 tokens: limits are counted instead of sorted there."""

    @settings(max_examples=examples, deadline=None)
    @given(st.lists(PARAMS, min_size=1, max_size=SLOTS), st.data())
    def holds(params: list[SamplingParams], data: st.DataObject) -> None:
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
        table = table_of(params, vocab)
        buffer = torch.from_numpy(rng.integers(0, vocab, (SLOTS, LENGTH)).astype(np.int32))
        slots = rng.permutation(len(params)).astype(np.int64)
        lowest = rng.integers(7, 12, len(slots)) + slots
        owner = np.sort(np.concatenate([np.arange(len(slots)), rng.integers(0, len(slots), 5)]))
        draws = np.bincount(owner) + rng.integers(0, 3, len(slots))
        positions = lowest[owner] + rng.integers(0, 7, len(owner))
        logits = torch.from_numpy(rng.normal(0, 2, (len(owner), vocab)).astype(np.float32))
        logits[:, :4] = logits[:, 4:8]  # ties
        masked = np.flatnonzero(rng.random(len(owner)) < 0.3)
        masks = rng.integers(-(2**31), 2**31 - 1, (len(masked), -(-vocab // 32))).astype(np.int32)
        expected = Sampler(table)(logits.clone(), SamplingBatch(slots[owner], positions, buffer, masked, masks))
        rows = DeviceRows(table, slots, lowest, 7, draws, buffer, exact=exact).draws(torch.from_numpy(owner))
        there = torch.from_numpy(positions)
        assert torch.equal(rows.choose(logits.clone(), there, masked, masks), expected.ids)
        found = rows.sample(logits, there, masked, masks)
        assert torch.equal(found.ids, expected.ids)
        assert (found.logprobs is None) == (expected.logprobs is None)
        if found.logprobs is not None and expected.logprobs is not None:
            asked = len(expected.logprobs.rows)
            assert len(found.logprobs.rows) == asked or not exact
            mine: Any = found.logprobs.take(np.arange(asked))
            for name in ("chosen", "ranks", "top_ids", "top_values"):
                assert torch.equal(getattr(mine, name), getattr(expected.logprobs, name))

    holds()


ASKING: dict[str, tuple[dict[str, Any], str]] = {
    "penalties": ({"temperature": 0, "presence_penalty": 0.5}, "penalise"),
    "minimum": ({"temperature": 0, "min_tokens": 9}, "_hold_back"),
    "sampling": ({"temperature": 1.0}, "scaled_weights"),
    "top_p": ({"temperature": 1.0, "top_p": 0.5}, "ordered_limits"),
    "logprobs": ({"temperature": 0, "logprobs": 2}, "gather_logprobs"),
}


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("feature", ASKING)
def test_what_one_row_asks_for_costs_its_own_draws(feature: str, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six rows, eleven draws, of which the row that asks has two and might have three."""
    asked, operation = ASKING[feature]
    others: dict[str, Any] = {"temperature": 1.0} if feature == "top_p" else {"temperature": 0}
    table = table_of([SamplingParams(**(asked if slot == 4 else others), max_tokens=64) for slot in range(SLOTS)], 32)
    sizes, run = [], getattr(device_draws, operation)

    def counted(logits: torch.Tensor, *rest: Any) -> Any:
        sizes.append(len(logits))
        return run(logits, *rest)

    monkeypatch.setattr(device_draws, operation, counted)
    owner = torch.tensor([0, 0, 0, 1, 2, 2, 3, 4, 4, 5, 5])
    buffer = torch.ones(SLOTS, LENGTH, dtype=torch.int32)
    draws = np.array([3, 1, 3, 3, 3, 3])
    rows = DeviceRows(table, np.arange(SLOTS), np.full(SLOTS, 12), 7, draws, buffer, exact=exact)
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 2, (11, 32)).astype(np.float32))
    rows.draws(owner).sample(logits, torch.full((11,), 14))
    assert sizes == [2 if exact else 3]


def test_a_draft_draws_once_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row has one draw then: no room is kept for more."""
    table = table_of([SamplingParams(temperature=float(slot == 2)) for slot in range(SLOTS)], 32)
    sizes, run = [], device_draws.pick
    monkeypatch.setattr(
        device_draws, "pick", lambda weights, numbers: sizes.append(len(weights)) or run(weights, numbers)
    )
    buffer = torch.ones(SLOTS, LENGTH, dtype=torch.int32)
    rows = DeviceRows(table, np.arange(SLOTS), np.full(SLOTS, 12), 7, np.full(SLOTS, 5), buffer)
    rows.draws(torch.arange(SLOTS)).choose(torch.zeros(SLOTS, 32), torch.full((SLOTS,), 14))
    assert sizes == [1]


def test_a_stop_id_is_drawn_below_the_minimum_length_where_nothing_else_is_allowed() -> None:
    table = table_of([SamplingParams(temperature=0, min_tokens=4)], 32)
    buffer = torch.zeros(SLOTS, LENGTH, dtype=torch.int32)
    rows = DeviceRows(table, np.array([0]), np.array([7]), 5, np.array([1]), buffer).draws(torch.tensor([0]))
    only = np.array([[1 << 2 | 1 << 5]], np.int32)  # both stop ids of slot 0
    for position, allowed, token in ((7, only, 5), (7, only | 1 << 8, 8), (10, only | 1 << 8, 5)):
        logits = torch.zeros(1, 32)
        logits[0, 5] = 3.0
        got = rows.choose(logits, torch.tensor([position]), np.array([0]), allowed)
        assert got.tolist() == [token]
