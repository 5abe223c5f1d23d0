"""Draws of rows that only the device knows are those of `Sampler` at the same places, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from deepinfer_offline.sampling import Sampler, SamplingBatch, SamplingParams, SamplingTable
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
def test_draws_are_the_samplers(vocab: int, examples: int) -> None:
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
        positions = lowest[owner] + rng.integers(0, 7, len(owner))
        logits = torch.from_numpy(rng.normal(0, 2, (len(owner), vocab)).astype(np.float32))
        logits[:, :4] = logits[:, 4:8]  # ties
        masked = np.flatnonzero(rng.random(len(owner)) < 0.3)
        masks = rng.integers(-(2**31), 2**31 - 1, (len(masked), -(-vocab // 32))).astype(np.int32)
        expected = Sampler(table)(logits.clone(), SamplingBatch(slots[owner], positions, buffer, masked, masks))
        rows = DeviceRows(table, slots, lowest, 7, buffer)
        given_logits = logits.clone()
        ids = rows.choose(given_logits, torch.from_numpy(owner), torch.from_numpy(positions), masked, masks)
        assert torch.equal(ids, expected.ids)
        found = rows.logprobs(given_logits, ids)
        assert (found is None) == (expected.logprobs is None)
        if found is not None and expected.logprobs is not None:
            mine: Any = found.take(np.flatnonzero(table.logprobs[slots[owner]] >= 0))
            assert np.array_equal(mine.rows, expected.logprobs.rows)
            for name in ("chosen", "ranks", "top_ids", "top_values"):
                assert torch.equal(getattr(mine, name), getattr(expected.logprobs, name))

    holds()


def test_a_stop_id_is_drawn_below_the_minimum_length_where_nothing_else_is_allowed() -> None:
    table = table_of([SamplingParams(temperature=0, min_tokens=4)], 32)
    rows = DeviceRows(table, np.array([0]), np.array([7]), 5, torch.zeros(SLOTS, LENGTH, dtype=torch.int32))
    only = np.array([[1 << 2 | 1 << 5]], np.int32)  # both stop ids of slot 0
    for position, allowed, token in ((7, only, 5), (7, only | 1 << 8, 8), (10, only | 1 << 8, 5)):
        logits = torch.zeros(1, 32)
        logits[0, 5] = 3.0
        got = rows.choose(logits, torch.tensor([0]), torch.tensor([position]), np.array([0]), allowed)
        assert got.tolist() == [token]
