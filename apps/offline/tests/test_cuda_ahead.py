"""Captured steps of a Llama model with a DSpark draft, as far as a CPU can show it; see `test_cuda_prompts.py`.

Started by `test_cuda_interpreted.py`.
"""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1, see test_cuda_interpreted.py", allow_module_level=True)
pytest.importorskip("triton")
pytest.importorskip("deepinfer_kernels_cuda")

from deepinfer_offline.engine.base import Request
from deepinfer_offline.engine.native.acceptance import keep_agreeing
from deepinfer_offline.engine.native.ahead_buffers import AheadBucket, AheadBuffers
from deepinfer_offline.engine.native.ahead_rows import AheadState, DrawingRows, ahead_batch, lay_out
from deepinfer_offline.engine.native.batch import plan_inputs
from deepinfer_offline.engine.native.build import build_native
from deepinfer_offline.engine.native.repeated import Repeated
from deepinfer_offline.engine.native.step_memory import StepMemory
from deepinfer_offline.engine.native.tokens import TokenBuffer
from deepinfer_offline.engine.native.whole_buffers import WholeBucket, WholeBuffers
from deepinfer_offline.engine.native.whole_steps import WholeSteps
from deepinfer_offline.engine.options import EngineOptions
from deepinfer_offline.models.base import CacheGroup, ModelOptions
from deepinfer_offline.models.llama.model import LlamaModel
from deepinfer_offline.ops.attention.base import GROUP
from deepinfer_offline.ops.cuda.attention import CudaAttention
from deepinfer_offline.sampling import SamplingParams
from deepinfer_offline.sampling.batch import SamplingTable
from deepinfer_sched import Ahead, StepPlan
from deepinfer_specdec.dspark import DSparkConfig, DSparkModel
from deepinfer_specdec.dspark.loader import save_draft
from interpreted import LLAMA, RandomLlama, Repeats, use_kernels

NEAR = 1e-5  # of values of size 1
WIDTH, VOCAB, BLOCK = 3, LLAMA["vocab_size"], 8


def make_draft(folder: Path, said: list[list[int]]) -> Path:
    """A draft that guesses what followed a token in what was said, by its sequential head; its other weights are small."""
    config = DSparkConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=3, num_kv_heads=1, head_dim=16,
        taps=(-1, 0), num_target_layers=2, block_size=WIDTH, mask_token_id=0, markov_rank=VOCAB,
    )  # fmt: skip
    torch.manual_seed(1)
    model = DSparkModel(config).requires_grad_(False)
    assert model.markov_head is not None
    follows = torch.zeros(VOCAB, VOCAB)
    for ids in said:
        for before, after in pairwise(ids):
            follows[after, before] += 50
    model.markov_head.w1.weight.copy_(torch.eye(VOCAB))
    model.markov_head.w2.weight.copy_(follows)
    save_draft(model, folder)
    return folder


def answers(draft: Path | None, drafts: int | None = None, **asked: Any) -> tuple[list[list[int]], Any]:
    """Answers, and the engine's graphs and statistics.

    Args:
        draft: of the model.
        drafts: verified in each row; None: speculation is off.
        asked: parameters of the last request; others are greedy.
    """
    options = EngineOptions(
        engine="native", device="cpu", dtype="float32", max_running=4, max_tokens_per_step=32, kv_memory=1 << 20,
        max_model_len=96, enable_prefix_caching=False, draft_model=draft,
        speculative="dspark" if draft else "off",
    )  # fmt: skip
    source: Any = RandomLlama()
    engine, rng = build_native(options, source, None), np.random.default_rng(3)
    parts = engine._parts
    if drafts is None:
        engine._parts = replace(parts, speculation=None)
    elif parts.speculation is not None:
        parts.speculation.force(drafts)
    for number, (length, count) in enumerate(((20, 24), (3, 9), (50, 16))):
        settings: dict[str, Any] = {"temperature": 0} | (asked if number == 2 else {})
        params = SamplingParams(max_tokens=count, seed=5, **settings)
        engine.add_request(Request(str(number), rng.integers(0, VOCAB, length).tolist(), params))
    found: dict[str, list[int]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            assert output.error is None, output.error
            found[output.request_id] = list(output.outputs[0].token_ids)
    stats = engine.stats()
    engine.close()
    return [found[str(number)] for number in range(len(found))], SimpleNamespace(
        graphs=parts.runner._graphs, stats=stats
    )


FILTERED = {"temperature": 0.8, "top_p": 0.9, "top_k": 30, "min_p": 0.01}
PENALISED = {"temperature": 0.8, "repetition_penalty": 1.2}


@pytest.mark.parametrize(("drafts", "asked"), [(WIDTH, {}), (0, {}), (WIDTH, FILTERED), (WIDTH, PENALISED)])
def test_captured_steps_with_a_draft_say_what_steps_without_one_say(
    drafts: int, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All drafts are verified or none; steps are captured whole, or in parts for a row that asks for more than filters. Replays
    spoil what other graphs left.
    """
    expected, _ = answers(None, **asked)
    draft = make_draft(tmp_path, expected)
    use_kernels(monkeypatch, 1000)
    found, made = answers(draft, drafts, **asked)
    assert found == expected
    ahead, parts = made.graphs.ahead, asked is PENALISED
    assert bool(ahead.captured) == bool(ahead.drafts.captured) == parts
    assert not made.graphs.decodes.sizes
    assert Repeats.replays > ahead.tries
    widths = {bucket.width for bucket in (ahead.captured if parts else ahead.whole.captured)}
    assert 1 + WIDTH in widths if drafts else widths == {1}
    assert any(bucket.draws for bucket in ahead.whole.captured) == (asked is FILTERED)
    if drafts:
        assert made.stats.accepted_tokens > 0.2 * made.stats.drafted_tokens > 0


def test_steps_of_a_model_with_a_draft_are_captured_while_speculation_is_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected, _ = answers(None)
    draft = make_draft(tmp_path, expected)
    use_kernels(monkeypatch, 1000)
    found, made = answers(draft)
    assert found == expected
    assert made.graphs.decodes.sizes
    assert made.graphs.prompts.sizes


def test_steps_that_there_is_no_memory_to_capture_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expected, _ = answers(None)
    draft = make_draft(tmp_path, expected)
    use_kernels(monkeypatch, 0)
    found, made = answers(draft, WIDTH)
    assert found == expected
    assert not made.graphs.ahead.whole.captured
    assert made.graphs.ahead.tries > 0


# --- one step ----------------------------------------------------------------------------------------------------


def make_model(monkeypatch: pytest.MonkeyPatch, draft: Path) -> LlamaModel:
    use_kernels(monkeypatch, 1000)
    options = ModelOptions("cpu", torch.float32, 96, 5, 64, BLOCK, draft)
    source: Any = RandomLlama()
    return LlamaModel.load(source, options)


CONFIDENCE = torch.tensor([[2.0, 1.5, -1.0], [0, 0, 0], [0.5, 3.0, 3.0], [0, 0, 0], [-1.0, 2.0, 2.0]])


def ahead_step(tokens: TokenBuffer, budget: int) -> tuple[StepPlan, Any, DrawingRows, np.ndarray]:
    """Three decode rows that verify `budget` drafts together; where two of them begin, the device alone knows."""
    nothing = np.zeros(3, np.int32)
    drafts, slack = np.array([3, 3, 2], np.int32) * bool(budget), np.array([3, 0, 2], np.int32)
    starts = np.array([30, 9, 64], np.int32)
    plan = StepPlan(
        7, np.arange(3), np.array([4, 0, 2], np.int32), starts, 1 + drafts, drafts, np.ones(3, bool), np.zeros(3, bool),
        np.zeros(3, bool), nothing, np.array([0, 8, 0], np.int32), slack, ahead=Ahead(budget, WIDTH),
    )  # fmt: skip
    tables = 1 + np.arange(5 * 12, dtype=np.int32).reshape(5, 12)
    inputs = plan_inputs(plan, [CacheGroup(GROUP, "prefix", BLOCK, 8)], {GROUP: tables}.__getitem__, tokens, {})
    lengths = torch.tensor([10, 0, 64, 0, 28])
    scaling = np.array([[1.0] * 3, [0.0] * 3], np.float32)
    return plan, inputs, lay_out(plan, AheadState(lengths, CONFIDENCE), scaling, tokens), tables


@pytest.mark.parametrize(
    ("budget", "bucket"),
    [(4, (16, 4, 4)), (4, (16, 3, 4)), (4, (8, 4, 4)), (5, (8, 8, 4)), (0, (8, 8, 1)), (0, (3, 3, 1))],
)
def test_a_padded_step_is_the_step_and_writes_nothing_that_anybody_reads(
    budget: int, bucket: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Behind a step that left the blocks of live sequences in the shared tables; tokens that no row has are no numbers."""
    model = make_model(monkeypatch, make_draft(tmp_path, []))
    tokens, groups = TokenBuffer(5, 100, "cpu"), (CacheGroup(GROUP, "prefix", BLOCK, 8),)
    tokens.flat.copy_(torch.randint(0, VOCAB, tokens.flat.shape, generator=torch.Generator().manual_seed(2)))
    plan, inputs, rows, _ = ahead_step(tokens, budget)
    caches = [model.allocate_cache({GROUP: 64}) for _ in range(2)]
    for pools in zip(*((*cache.layers, *cache.draft) for cache in caches), strict=True):
        torch.manual_seed(len(pools[0]))
        for pool in pools:
            pool.copy_(torch.randn(pools[0].shape, generator=torch.Generator().manual_seed(4)))
    batch = ahead_batch(plan, inputs, rows, tokens, "cpu", exact=False)
    expected = model.forward(batch, caches[0])

    attend, count = CudaAttention.__call__, 3 + budget

    def leave_rubbish(self: Any, qkv: torch.Tensor, *rest: Any) -> torch.Tensor:
        found = attend(self, qkv, *rest)
        found[count + bucket[1] - 3 :] = torch.nan
        return found

    monkeypatch.setattr(CudaAttention, "__call__", leave_rubbish)
    memory = StepMemory(groups, 10, 96, "cpu")
    memory.packed.fill_(7)
    memory.tables.fill_(7)
    buffers = AheadBuffers.of(memory, AheadBucket(*bucket))
    buffers.fill(inputs, rows)
    padded = buffers.batch(tokens)
    assert torch.equal(padded.token_ids[:count], batch.token_ids)
    assert torch.equal(padded.positions[:count], batch.positions)
    assert padded.host.counts.max() >= padded.query_starts.diff().max()
    found = model.forward(padded, caches[1])
    assert (found[:count] - expected).abs().max() < NEAR
    for one, other in zip((*caches[0].layers, *caches[0].draft), (*caches[1].layers, *caches[1].draft), strict=True):
        assert (one[1:] - other[1:]).abs().max() < NEAR, "a block of somebody was written"
        assert other[0].isfinite().all(), "block 0 is read where nothing is seen"


@pytest.mark.parametrize(("budget", "bucket"), [(4, (16, 4, 4)), (5, (8, 8, 4)), (0, (8, 8, 1)), (0, (3, 3, 1))])
def test_a_step_captured_whole_is_the_step(
    budget: int, bucket: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What it emits and drafts, and what it leaves: in the token buffer, of the slots, and in blocks of somebody."""
    model = make_model(monkeypatch, make_draft(tmp_path, []))
    ahead: Any = SimpleNamespace(tokens=TokenBuffer(5, 100, "cpu"))
    ahead.tokens.flat.copy_(
        torch.randint(0, VOCAB, ahead.tokens.flat.shape, generator=torch.Generator().manual_seed(2))
    )
    plan, inputs, rows, _ = ahead_step(ahead.tokens, budget)
    states, buffers, caches = [], [], []
    for _ in range(2):
        tokens, cache = TokenBuffer(5, 100, "cpu"), model.allocate_cache({GROUP: 64})
        tokens.flat.copy_(ahead.tokens.flat)
        for pool in (*cache.layers, *cache.draft):
            pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(4)))
        lengths, confidence = torch.tensor([10, 0, 64, 0, 28, 9]), torch.zeros(6, WIDTH)
        confidence[:5] = CONFIDENCE
        states.append(AheadState(lengths, confidence))
        buffers.append(tokens)
        caches.append(cache)
    # Half of the drafts are what the model says.
    with torch.inference_mode():
        batch = ahead_batch(plan, inputs, rows, buffers[0], "cpu", exact=False)
        drawn = model.logits(model.forward(batch, caches[0])).argmax(-1)
        for tokens in buffers:
            right = rows.owner != 1  # also where a row does not verify what stands there
            tokens.scatter(rows.places[right], drawn[right])
        batch = ahead_batch(plan, inputs, rows, buffers[0], "cpu", exact=False)
        drawn = model.logits(model.forward(batch, caches[0])).argmax(-1)
        drafted = rows.column < rows.verified[rows.owner]
        kept = keep_agreeing(drawn, buffers[0], rows.owner, rows.column, drafted, rows.places, rows.begins, bucket[2])
        after = rows.first + kept.counts
        anchors, tables = buffers[0].gather(rows.base + after - 1), batch.block_tables[GROUP].long()

        def choose(logits: torch.Tensor, column: int) -> torch.Tensor:
            buffers[0].scatter(rows.base + after + column, logits.argmax(-1))
            return logits.argmax(-1)

        block = model.draft_blocks(anchors, after - 1, tables, caches[0], choose, 70)
        memory = StepMemory((CacheGroup(GROUP, "prefix", BLOCK, 8),), 10, 96, "cpu")
        memory.packed.fill_(7)
        memory.tables.fill_(7)
        recorder: Any = None
        steps = WholeSteps(model, caches[1], buffers[1], recorder, memory, states[1], [1, 5], [1, 5, 16])
        filled = WholeBuffers.of(memory, WholeBucket(*bucket, 96), WIDTH, 5)
        filled.fill(plan, inputs, np.array([[1.0] * 3, [0.0] * 3], np.float32), SamplingTable(5))
        ids, counts, verified, guessed, sure = (part[:3] for part in steps._work(filled))
    assert torch.equal(ids, kept.token_ids)
    assert counts.tolist() == kept.counts.tolist()
    assert budget == 0 or 1 < int(counts.max()) > int(counts.min()), "all drafts fare alike: the test shows nothing"
    assert torch.equal(verified, rows.verified)
    assert torch.equal(guessed, block.token_ids)
    assert (sure - block.confidence).abs().max() < NEAR
    assert torch.equal(buffers[0].data, buffers[1].data)
    slots = plan.slots.tolist()
    assert states[1].lengths[slots].tolist() == after.tolist()
    assert torch.equal(states[1].confidence[slots], sure)
    assert states[1].lengths[[1, 3]].tolist() == [0, 0]
    assert torch.equal(states[1].confidence[[1, 3]], CONFIDENCE[[1, 3]])
    for one, other in zip((*caches[0].layers, *caches[0].draft), (*caches[1].layers, *caches[1].draft), strict=True):
        assert (one[1:] - other[1:]).abs().max() < NEAR, "a block of somebody was written"
        assert other[0].isfinite().all()


def test_work_is_run_then_captured_then_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Repeats, "replays", 0)
    log: list[str] = []

    def work(name: str) -> torch.Tensor:
        log.append(name)
        return torch.ones(2)

    recorder: Any = Repeats("cpu", 0, 0)
    repeated = Repeated(recorder, lambda bucket: f"buffers of {bucket}", work, 1)
    seen = []
    for bucket in (7, 7, 7, 8, 8, 7):
        assert repeated.buffers(bucket) == f"buffers of {bucket}"
        before = repeated.firsts
        assert repeated.run(bucket).tolist() == [1, 1]
        seen.append(repeated.firsts > before)
    assert seen == [True, True, False, True, False, False], "prices of steps that are alike"
    assert (repeated.captured, repeated.tries, Repeats.replays) == ([7], 1, 3), "one graph is the most"
