"""The runner: layout of a step, ids that feed the next step on the device, verification, prompt log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from deepinfer_offline.engine.native.batch import device_batch, plan_inputs
from deepinfer_offline.engine.native.runner import ModelRunner
from deepinfer_offline.engine.native.tokens import TokenBuffer
from deepinfer_offline.engine.native.worker import ThreadWorker
from deepinfer_offline.models.base import CacheGroup, ForwardBatch, ModelOptions
from deepinfer_offline.sampling.batch import SampledTokens, SamplingBatch
from deepinfer_sched import Cascade, StepPlan
from hypothesis import given, settings
from hypothesis import strategies as st

VOCAB = 97
GROUP = CacheGroup("kv", "prefix", 4, 8)


def plan_of(rows: list[dict[str, Any]], step: int = 1, cascades: tuple[Cascade, ...] = ()) -> StepPlan:
    def column(name: str, dtype: Any, default: Any = 0) -> np.ndarray:
        return np.array([row.get(name, default) for row in rows], dtype)

    return StepPlan(
        step, np.arange(len(rows)), column("slot", np.int32), column("start", np.int32), column("count", np.int32, 1),
        column("drafts", np.int32), column("samples", bool, True), column("prefill", bool), column("bound", bool),
        column("floor", np.int32), column("write_floor", np.int32), column("slack", np.int32), cascades,
    )  # fmt: skip


class Successor:
    """A model whose likeliest next token after t is t + 1. Its cache is unused."""

    def __init__(self) -> None:
        self.facts = SimpleNamespace(cache_groups=(GROUP,), vocab_size=VOCAB)
        self.options = ModelOptions("cpu", torch.float32, 32, 4, 64, 4)
        self.batches: list[ForwardBatch] = []

    def allocate_cache(self, num_blocks: Mapping[str, int]) -> None:
        assert num_blocks == {"kv": 9}

    def forward(self, batch: ForwardBatch, cache: None) -> torch.Tensor:
        self.batches.append(batch)
        return batch.token_ids[batch.logit_rows].float()[:, None]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.eye(VOCAB)[(hidden[:, 0].long() + 1) % VOCAB] * 3


def greedy(logits: torch.Tensor, batch: SamplingBatch) -> SampledTokens:
    assert len(batch.slots) == len(batch.positions) == len(logits)
    return SampledTokens(logits.argmax(-1))


@pytest.fixture(params=[0, 1], ids=["inline", "thread"])
def runner(request: pytest.FixtureRequest) -> Any:
    tables = np.arange(4 * 8, dtype=np.int32).reshape(4, 8)
    made = ModelRunner(Successor(), {"kv": 9}, lambda _: tables, greedy, threads=request.param, max_drafts=4)  # type: ignore[arg-type]
    yield made
    made.close()


def test_a_step_reads_what_the_step_before_drew(runner: ModelRunner) -> None:
    runner.add_sequence(2, [5, 6, 7])
    runner.add_sequence(0, [40])
    first = runner.launch(plan_of([{"slot": 2, "count": 3, "prefill": True}, {"slot": 0, "prefill": True}]))
    second = runner.launch(
        plan_of([{"slot": 2, "start": 3}, {"slot": 0, "start": 1}], 2)
    )  # before `first` is collected
    third = runner.launch(plan_of([{"slot": 0, "start": 2}, {"slot": 2, "start": 4}], 3))
    ids = [runner.collect(flight).token_ids[:, 0].tolist() for flight in (first, second, third)]
    assert ids == [[8, 41], [9, 42], [43, 10]]


def test_rows_that_do_not_sample_draw_nothing(runner: ModelRunner) -> None:
    runner.add_sequence(1, [3, 4, 5, 6])
    part = {"slot": 1, "count": 2, "prefill": True, "samples": False}
    result = runner.collect(runner.launch(plan_of([part])))
    assert result.num_tokens.tolist() == [0]
    result = runner.collect(runner.launch(plan_of([{**part, "start": 2, "samples": True}], 2)))
    assert (result.num_tokens.tolist(), result.token_ids.tolist()) == ([1], [[7]])


@pytest.mark.parametrize(("drafts", "accepted"), [([11, 12, 13], 4), ([11, 50, 13], 2), ([50, 11, 12], 1)])
def test_drafts_count_as_far_as_they_are_what_is_drawn(runner: ModelRunner, drafts: list[int], accepted: int) -> None:
    runner.add_sequence(3, [9, 10])
    runner.add_sequence(1, [60, 61])
    runner.write_drafts(np.array([3]), np.array([2]), np.array([drafts]), np.array([3]))
    rows = [{"slot": 3, "start": 1, "count": 4, "drafts": 3}, {"slot": 1, "start": 1}]
    result = runner.collect(runner.launch(plan_of(rows)))
    assert result.num_tokens.tolist() == [accepted, 1]
    expected = [11, 12, 13, 14][:accepted]
    assert result.token_ids[0, :accepted].tolist() == expected
    assert result.token_ids[1, 0] == 62
    after = runner.launch(plan_of([{"slot": 3, "start": 1 + accepted}], 2))
    assert runner.collect(after).token_ids[0, 0] == expected[-1] + 1, "the next step reads the last accepted token"


def test_prompt_log_probabilities(runner: ModelRunner) -> None:
    prompt = [5, 6, 20, 21]
    runner.add_sequence(0, prompt, prompt_logprobs=(4, 2))
    parts = [{"slot": 0, "count": 3, "prefill": True, "samples": False}, {"slot": 0, "start": 3, "prefill": True}]
    first = runner.collect(runner.launch(plan_of([parts[0]])))
    last = runner.collect(runner.launch(plan_of([parts[1]], 2)))
    assert last.prompts == (), "the last prompt token predicts the first generated one"
    (found,) = first.prompts
    assert (found.slot, found.first, found.values.rows.tolist()) == (0, 0, [0, 1, 2])
    hit, miss = 3 - np.log(np.e**3 + VOCAB - 1), -np.log(np.e**3 + VOCAB - 1)
    assert found.values.chosen.tolist() == pytest.approx([hit, miss, hit], abs=1e-6)
    assert found.values.ranks.tolist() == [1, 2, 1]
    assert found.values.top_ids[:, 0].tolist() == [6, 7, 21]
    assert last.token_ids.tolist() == [[22]]


def test_steps_that_wait_say_so(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that runs calls in the caller's thread would stop planning for them."""
    said: list[bool] = []
    submit = runner._worker.submit

    def spy(call: Any, *, waits: bool = False) -> Any:
        said.append(waits)
        return submit(call, waits=waits)

    runner.add_sequence(0, [5, 6, 7, 8], prompt_logprobs=(4, 2))
    runner.add_sequence(1, [5, 6, 7, 8])
    monkeypatch.setattr(runner._worker, "submit", spy)
    plans = [
        plan_of([{"slot": 1, "count": 4, "prefill": True}]),
        plan_of([{"slot": 0, "count": 4, "prefill": True}], 2),
        plan_of([{"slot": 0, "start": 4}, {"slot": 1, "start": 4}], 3),
        plan_of([{"slot": 0, "start": 5, "count": 2, "drafts": 1}], 4),
    ]
    for plan in plans:
        runner.collect(runner.launch(plan))
    runner.collect(runner.launch(plan_of([{"slot": 0, "start": 6}], 5), masks=lambda _samples: None))
    assert said == [False, True, False, True, True]


def test_masks_are_asked_for_when_the_logits_are_there(runner: ModelRunner) -> None:
    runner.add_sequence(0, [5])
    asked: list[list[int]] = []

    def masks(rows: Any) -> None:
        asked.append(rows.positions.tolist())
        assert runner.model.batches, "the forward came first"  # type: ignore[attr-defined]

    runner.collect(runner.launch(plan_of([{"slot": 0}]), masks))
    assert asked == [[1]]


def test_an_error_in_a_step_reaches_collect_and_the_next_step_runs(runner: ModelRunner) -> None:
    runner.add_sequence(0, [5])

    def fail(_: Any) -> None:
        raise RuntimeError("no mask")

    flight = runner.launch(plan_of([{"slot": 0}]), fail)
    with pytest.raises(RuntimeError, match="no mask"):
        runner.collect(flight)
    assert runner.collect(runner.launch(plan_of([{"slot": 0}], 2))).token_ids.tolist() == [[6]]


def test_block_tables_are_those_of_the_launch() -> None:
    tables = np.arange(4 * 8, dtype=np.int32).reshape(4, 8)
    model = Successor()
    runner = ModelRunner(model, {"kv": 9}, lambda _: tables, greedy, threads=1)  # type: ignore[arg-type]
    runner.add_sequence(1, [1] * 6)
    flight = runner.launch(plan_of([{"slot": 1, "count": 6, "prefill": True}]))
    tables[:] = -1
    runner.collect(flight)
    runner.close()
    assert model.batches[0].block_tables["kv"].tolist() == [[8, 9]]


@settings(max_examples=80, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 9), st.integers(1, 6), st.integers(0, 2), st.booleans()), min_size=1, max_size=6
    )
)
def test_layout_of_random_plans(rows: list[tuple[int, int, int, bool]]) -> None:
    described = []
    for slot, (start, count, drafts, samples) in enumerate(rows):
        drafts = min(drafts, count - 1) if samples else 0
        described.append({"slot": slot, "start": start, "count": count, "drafts": drafts, "samples": samples})
    plan = plan_of(described)
    buffer = TokenBuffer(len(rows), 24, "cpu")
    buffer.data[:] = torch.arange(24) + 100 * torch.arange(len(rows))[:, None]
    tables = np.arange(len(rows) * 6, dtype=np.int32).reshape(-1, 6)
    inputs = plan_inputs(plan, (GROUP,), lambda _: tables, buffer, {})
    batch = device_batch(inputs, buffer, "cpu")
    host = batch.host
    assert (host.counts[: host.num_decodes] == 1).all()
    assert (host.counts[host.num_decodes :] > 1).all()
    for row, slot in enumerate(host.slots.tolist()):
        start, count = described[slot]["start"], described[slot]["count"]
        part = slice(int(host.query_starts[row]), int(host.query_starts[row + 1]))
        assert batch.token_ids[part].tolist() == [100 * slot + start + i for i in range(count)]
        assert batch.positions[part].tolist() == list(range(start, start + count))
        assert host.block_tables["kv"][row].tolist() == tables[slot, : host.block_tables["kv"].shape[1]].tolist()
    drawn = [
        (r["slot"], r["start"] + r["count"] - i) for r in described if r["samples"] for i in range(r["drafts"] + 1)
    ]
    found = list(zip(inputs.samples.slots.tolist(), inputs.samples.positions.tolist(), strict=True))
    assert sorted(found) == sorted(drawn)
    flat = host.logit_rows[inputs.samples.logits]
    assert (batch.positions.numpy()[flat] + 1 == inputs.samples.positions).all()
    assert (plan.slots[inputs.samples.plan_rows] == inputs.samples.slots).all()


@given(
    st.lists(st.tuples(st.integers(0, 22), st.integers(0, 9), st.integers(0, 22)), min_size=1, max_size=6),
    st.booleans(),
)
def test_decode_rows_are_laid_out_as_beside_a_prompt(rows: list[tuple[int, int, int]], shared: bool) -> None:
    """The direct way of a step of decode rows against the general one, which a prompt's row behind them asks for."""
    described: list[dict[str, Any]] = [
        {"slot": slot, "start": start, "floor": floor, "write_floor": write}
        for slot, (start, floor, write) in enumerate(rows)
    ]
    cascades = (Cascade(np.arange(len(rows), dtype=np.int32), 0, 8),) if shared and len(rows) > 1 else ()
    prompt = {"slot": 6, "count": 2, "prefill": True, "samples": False}
    buffer, tables = TokenBuffer(7, 24, "cpu"), np.arange(42, dtype=np.int32).reshape(7, 6)
    alone, beside = (
        plan_inputs(plan_of(plan, cascades=cascades), (GROUP,), lambda _: tables, buffer, {})
        for plan in (described, [*described, prompt])
    )
    count = len(rows)
    assert alone.host.num_decodes == beside.host.num_decodes == alone.host.num_rows == count
    for name in ("slots", "seq_lens", "prefills", "floors", "write_floors", "keep_all"):
        found, expected = getattr(alone.host, name), getattr(beside.host, name)[:count]
        assert found.tolist() == expected.tolist(), name
        assert found.dtype == expected.dtype, name
    assert alone.host.query_starts.tolist() == beside.host.query_starts[: count + 1].tolist()
    width = alone.host.block_tables["kv"].shape[1]
    assert alone.host.block_tables["kv"].tolist() == beside.host.block_tables["kv"][:count, :width].tolist()
    assert alone.host.logit_rows.tolist() == beside.host.logit_rows.tolist()
    assert alone.positions.tolist() == beside.positions[:count].tolist()
    assert alone.token_index.tolist() == beside.token_index[:count].tolist()
    for name in ("plan_rows", "slots", "positions", "logits"):
        found, expected = getattr(alone.samples, name), getattr(beside.samples, name)
        assert found.tolist() == expected.tolist(), name
        assert found.dtype == expected.dtype, name
    assert [(c.rows.tolist(), c.tokens) for c in alone.cascades] == [
        (c.rows.tolist(), c.tokens) for c in beside.cascades
    ]


def test_cascades_follow_their_rows_and_lose_those_that_verify() -> None:
    rows = [{"slot": 0, "start": 9, "count": 3, "drafts": 2}, *({"slot": i, "start": 9} for i in (1, 2, 3))]
    plan = plan_of(rows, cascades=(Cascade(np.array([0, 2, 3], np.int32), 2, 8),))
    buffer = TokenBuffer(4, 24, "cpu")
    inputs = plan_inputs(plan, (GROUP,), lambda _: np.zeros((4, 6), np.int32), buffer, {})
    (cascade,) = inputs.cascades
    assert inputs.host.slots[cascade.rows].tolist() == [2, 3]
    assert cascade.tokens == 8


def test_the_token_buffer_refuses_what_does_not_fit() -> None:
    buffer = TokenBuffer(2, 8, "cpu")
    with pytest.raises(ValueError, match="3 ids at position 6 do not fit a buffer of 8 positions"):
        buffer.write(0, 6, [1, 2, 3])


def test_a_closed_worker_takes_nothing() -> None:
    worker = ThreadWorker(1)
    worker.close()
    worker.close()
    with pytest.raises(RuntimeError, match="closed"):
        worker.submit(lambda: None)
