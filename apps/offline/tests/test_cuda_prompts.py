"""Captured steps with prompts, as far as a CPU can show it: Triton interprets kernels, and a graph is a call that is made again.

Started by `test_cuda_interpreted.py`, since the interpreter must be on before Triton is imported. Kernels and portable ops sum in
another order, so float32 results agree to some 1e-6 of their size; a wrong index is off by its whole size.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1, see test_cuda_interpreted.py", allow_module_level=True)
pytest.importorskip("triton")
pytest.importorskip("deepinfer_kernels_cuda")

from deepinfer_offline.engine.base import Request
from deepinfer_offline.engine.native.batch import StepInputs, device_batch, plan_inputs
from deepinfer_offline.engine.native.build import build_native
from deepinfer_offline.engine.native.prompt_buffers import PromptBucket, PromptBuffers
from deepinfer_offline.engine.native.step_buffers import StepBuffers
from deepinfer_offline.engine.native.step_memory import StepMemory
from deepinfer_offline.engine.native.tokens import TokenBuffer
from deepinfer_offline.engine.options import EngineOptions
from deepinfer_offline.models.base import CacheGroup
from deepinfer_offline.ops.attention.base import GROUP, AttentionShape
from deepinfer_offline.ops.attention.portable import TorchAttention
from deepinfer_offline.ops.cuda.attention import CudaAttention
from deepinfer_offline.ops.rope import RopeConfig, rope_table
from deepinfer_offline.sampling import SamplingParams
from deepinfer_sched import StepPlan
from interpreted import RandomLlama, Repeats, use_kernels

NEAR = 1e-5  # of values of size 1
GROUPS = (CacheGroup("long", "prefix", 4, 8), CacheGroup("ring", "state", 4, 8), CacheGroup("wide", "prefix", 16, 8))


def prompt_inputs(tokens: TokenBuffer, tables: dict[str, np.ndarray], rows: list[tuple[int, int, bool]]) -> StepInputs:
    """Rows (start, tokens, whether it draws); those of one token decode."""
    starts, counts, draws = (np.array(column) for column in zip(*rows, strict=True))
    number, nothing = len(rows), np.zeros(len(rows), np.int32)
    plan = StepPlan(
        1, np.arange(number), np.arange(number)[::-1].astype(np.int32), starts.astype(np.int32), counts.astype(np.int32),
        nothing, draws.astype(bool), counts > 1, np.zeros(number, bool), nothing + 1, nothing + 2, nothing, (),
    )  # fmt: skip
    return plan_inputs(plan, GROUPS, tables.__getitem__, tokens, {})


PROMPT_STEPS = (
    [(40, 1, True), (9, 1, True), (0, 37, True), (3, 12, False), (0, 2, True)],
    [(0, 20, False), (7, 11, True)],
    [(5, 1, True), (0, 3, True)],
)


def test_a_cleared_decode_step_writes_where_nobody_reads() -> None:
    """It runs before its capture, behind a step that left the blocks of live sequences in the tables that all steps share."""
    groups = [CacheGroup("window", "prefix", 4, 64), CacheGroup("state", "state", 1, 64)]
    memory, tokens = StepMemory(groups, 6, 16, "cpu"), TokenBuffer(3, 17, "cpu")
    memory.packed.fill_(7)
    memory.tables.fill_(7)
    buffers = StepBuffers.of(memory, 3, 16)
    buffers.clear()
    batch, target = buffers.batch(tokens)
    assert batch.seq_lens.tolist() == [1, 1, 1]
    assert batch.positions.tolist() == [0, 0, 0]
    for name in ("window", "state"):
        assert batch.block_tables[name][:, 0].tolist() == [0, 0, 0], name
    assert target.tolist() == [tokens.scratch] * 3


def test_a_packed_step_with_prompts_is_the_step() -> None:
    """As a captured graph reads it, over the same memory: a longer step, then shorter and smaller ones."""
    tokens = TokenBuffer(5, 64, "cpu")
    tokens.flat[:] = torch.arange(5 * 64 + 1)
    rng = np.random.default_rng(0)
    tables = {group.name: rng.integers(1, 99, (5, 16), dtype=np.int32) for group in GROUPS}
    memory = StepMemory(GROUPS, 11, 64, "cpu")
    for rows in PROMPT_STEPS:
        buffers, inputs = PromptBuffers.of(memory, PromptBucket(150, 6, 5)), prompt_inputs(tokens, tables, rows)
        buffers.fill(inputs, tokens)
        batch, expected = buffers.batch(tokens), device_batch(inputs, tokens, "cpu")
        count, decodes = len(expected.token_ids), inputs.host.num_decodes
        live = [*range(decodes), *range(6, 6 + len(rows) - decodes)]
        for name in ("token_ids", "positions"):
            assert torch.equal(getattr(batch, name)[:count], getattr(expected, name)), name
            assert getattr(batch, name)[count:].tolist() == [{"token_ids": tokens.scratch, "positions": 0}[name]] * (
                150 - count
            )
        for name in ("seq_lens", "slots", "floors", "write_floors"):
            assert torch.equal(getattr(batch, name)[live], getattr(expected, name)), name
            assert getattr(batch, name).dtype == getattr(expected, name).dtype, name
        assert torch.equal(batch.query_starts[live], expected.query_starts[:-1])
        counts = batch.query_starts.diff()
        assert counts[live].tolist() == inputs.host.counts.tolist()
        assert counts.sum() == count, "a row that pads has tokens"
        for name, table in expected.block_tables.items():
            assert torch.equal(batch.block_tables[name][live, : table.shape[1]], table), name
        draws = len(inputs.samples.slots)
        assert torch.equal(batch.logit_rows[:draws], expected.logit_rows)
        places = tokens.flat_index(inputs.samples.slots, inputs.samples.positions).tolist()
        assert buffers.fields["targets"].tolist() == [*places, *[tokens.scratch] * (11 - draws)]


@pytest.mark.parametrize("rows", PROMPT_STEPS)
def test_attention_over_a_padded_step_is_that_of_the_step(rows: list[tuple[int, int, bool]]) -> None:
    """Empty rows and tokens of nobody change no other row, and write nothing."""
    shape, rope = AttentionShape(3, 1, 16, 4, torch.float32, "cpu"), rope_table(RopeConfig(16), 64, "cpu")
    tokens, groups = TokenBuffer(5, 64, "cpu"), (CacheGroup(GROUP, "prefix", 4, 8),)
    tables = {group.name: 1 + np.arange(5 * 16, dtype=np.int32).reshape(5, 16) for group in (*GROUPS, *groups)}
    inputs = prompt_inputs(tokens, tables, rows)
    inputs = replace(inputs, host=replace(inputs.host, block_tables={GROUP: tables[GROUP][inputs.host.slots]}))
    buffers = PromptBuffers.of(StepMemory(groups, 11, 64, "cpu"), PromptBucket(150, 6, 5))
    buffers.fill(inputs, tokens)
    kernel, portable = CudaAttention(shape), TorchAttention(shape)
    torch.manual_seed(0)
    history, qkv = torch.randn(2, 1, 90, 4, 16), torch.randn(150, shape.qkv_width)
    torch_cache, cache = portable.allocate(90), kernel.allocate(90)
    torch_cache.copy_(history)
    cache.copy_(history.permute(2, 0, 3, 1, 4))
    step, count = device_batch(inputs, tokens, "cpu"), len(inputs.positions)
    expected = portable(qkv[:count].clone(), torch_cache, portable.prepare(step, rope))
    found = kernel(qkv.clone(), cache, kernel.prepare(buffers.batch(tokens), rope))
    assert (found[:count] - expected).abs().max() < NEAR
    assert (cache - torch_cache.permute(2, 0, 3, 1, 4)).abs().max() < NEAR, "keys or values lie elsewhere"


def answers(step_tokens: int, requests: int = 8) -> tuple[list[list[int]], Any]:
    options = EngineOptions(
        engine="native", device="cpu", dtype="float32", max_running=4, max_tokens_per_step=step_tokens, kv_memory=1 << 20,
        max_model_len=96, async_scheduling=False, enable_prefix_caching=False,
    )  # fmt: skip
    source: Any = RandomLlama()
    engine, rng = build_native(options, source, None), np.random.default_rng(3)
    params = [SamplingParams(temperature=heat, max_tokens=count, seed=5) for heat, count in ((0, 5), (0, 7), (1.5, 4))]
    lengths = (33, 3, 50, 21, 40, 29, 1, 18)[:requests]
    for number, length in enumerate(lengths):
        engine.add_request(Request(str(number), rng.integers(0, 96, length).tolist(), params[number % 3]))
    found: dict[str, list[int]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            assert output.error is None, output.error
            found[output.request_id] = list(output.outputs[0].token_ids)
    engine.close()
    return [found[str(number)] for number in range(len(lengths))], engine._parts.runner._graphs


def test_a_job_over_captured_steps_says_what_the_portable_ops_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and sampled answers, prompts in one piece and in several; steps of prompts are run, captured and replayed."""
    expected, none = answers(64)
    assert none is None
    use_kernels(monkeypatch, 1000)
    found, made = answers(64)
    assert found == expected
    assert made.prompts.sizes, "no step with prompts was captured"
    assert made.decodes.sizes
    assert Repeats.replays > len(made.decodes.sizes) + len(made.prompts.sizes)

    use_kernels(monkeypatch, 1)
    found, made = answers(64, 3)
    assert found == expected[:3], "once memory is full"
    assert len(made.prompts.sizes) + len(made.decodes.sizes) == 1
    assert (
        1
        < Repeats.tries
        == len(made.decodes._captured) + sum(found.tried for found in made.prompts._repeated._prepared.values())
    )
