"""The CUDA providers without a GPU: Triton interprets their kernels on CPU tensors, in float32.

Started by `test_cuda_interpreted.py`, since the interpreter must be on before Triton is imported. Kernels and portable ops sum in
another order, so results agree to some 1e-6 of their size; a wrong index or scale is off by its whole size.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1, see test_cuda_interpreted.py", allow_module_level=True)
pytest.importorskip("triton")
pytest.importorskip("deepinfer_kernels_cuda")

from deepinfer_offline.engine.native.batch import StepInputs, device_batch, plan_inputs
from deepinfer_offline.engine.native.step_buffers import StepBuffers
from deepinfer_offline.engine.native.step_memory import StepMemory
from deepinfer_offline.engine.native.tokens import TokenBuffer
from deepinfer_offline.models.base import CacheGroup, ForwardBatch, HostBatch, ModelOptions
from deepinfer_offline.models.deepsig_v41 import device
from deepinfer_offline.models.deepsig_v41.device import DeviceBackbone
from deepinfer_offline.models.deepsig_v41.model import DeepSigV41Model
from deepinfer_offline.models.deepsig_v41.session import Chunk, Session
from deepinfer_offline.models.deepsig_v41.synthetic import random_tensors
from deepinfer_offline.ops.attention.base import GROUP, AttentionShape
from deepinfer_offline.ops.attention.portable import TorchAttention
from deepinfer_offline.ops.cuda import products as cuda_products
from deepinfer_offline.ops.cuda.attention import CudaAttention, shape_reason
from deepinfer_offline.ops.cuda.linear import CublasLinear
from deepinfer_offline.ops.cuda.products import FusedProducts, widths_reason
from deepinfer_offline.ops.deepsig import kv_gather
from deepinfer_offline.ops.linear import TorchLinear, silu_mul
from deepinfer_offline.ops.norm import rms_norm
from deepinfer_offline.ops.products import LayerWidths, SeparateProducts
from deepinfer_offline.ops.rope import RopeConfig, rope_table
from deepinfer_offline.weights.source import resolve_model
from deepinfer_sched import StepPlan

NEAR = 1e-5  # of values of size 1
DSPARK = Path(__file__).parent / "data" / "v41-oracle" / "dev-dspark"

V41 = {
    "model_type": "deepsig_v41",
    "text_config": {
        "vocab_size": 64,
        "hidden_size": 32,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "head_dim": 32,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "sliding_window": 8,
        "compress_ratios": [0, 2, 1, 1],
        "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2, 3],
        "index_n_heads": 2,
        "index_head_dim": 32,
        "index_topk": 8,
        "candidate_source_layer_id": 2,
        "candidate_topk_blocks": 2,
        "candidate_block_size": 4,
        "n_routed_experts": 2,
        "num_experts_per_tok": 2,
        "engram_layer_ids": [],
        "engram_num_embeddings": [],
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": 4096,
        "hc_sinkhorn_iters": 3,  # the interpreter takes a millisecond for each and row; the kernels' own tests run twenty
    },
}


class Memory:
    """A reader over tensors in memory."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> list[str]:
        return list(self.tensors)

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        return "F32", tuple(self.tensors[name].shape)

    def read(self, name: str) -> torch.Tensor:
        return self.tensors[name]


def v41_model() -> DeepSigV41Model:
    from deepinfer_offline.models.deepsig_v41.config import V41Config

    tensors = dict(random_tensors(V41Config.parse(V41), 0))
    return DeepSigV41Model.from_reader(V41, Memory(tensors), ModelOptions("cpu", torch.float32, 256, 4, 512, 4))


def v41_steps(model: DeepSigV41Model) -> list[torch.Tensor]:
    """Prompts in chunks beside decode rows, a chunk longer than the window, and rows that verify drafts."""
    session = Session(model, slots=3, capacity=96, seed=3)
    rng = np.random.default_rng(1)
    for slot in range(3):
        session.write(slot, 0, rng.integers(0, 64, 90).tolist())
    found = [session.run(Chunk(0, 0, 21), Chunk(1, 0, 3))]
    found.append(session.run(Chunk(0, 21, 1, prefill=False), Chunk(1, 3, 1, prefill=False), Chunk(2, 0, 2)))
    found.append(session.run(Chunk(0, 22, 3, prefill=False, wanted=3), Chunk(1, 4, 1, prefill=False)))
    return found


def test_v41_layers_on_kernels_are_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """With scores in one piece or, for prompts, in three."""
    monkeypatch.setattr(device, "MAX_SCORES", 200)
    model = v41_model()
    expected = v41_steps(model)
    b = model.backbone
    model.backbone = DeviceBackbone(
        b.config, b.schedule, b.weights, b.frequencies, b.engram, b.decoder_replay, b.block_size
    )
    found = v41_steps(model)
    for step, (a, e) in enumerate(zip(found, expected, strict=True)):
        assert (a - e).abs().max() < NEAR, f"step {step}"
    assert model.backbone.counters == b.counters


def test_v41_draft_context_on_kernels_is_the_reference() -> None:
    """Records of the draft stages after prompts, decode rows and verified rows; a value at the edge may round the other way."""
    found = []
    for on_kernels in (False, True):
        model = DeepSigV41Model.load(resolve_model(str(DSPARK)), ModelOptions("cpu", torch.float32, 256, 4, 512, 4))
        b = model.backbone
        if on_kernels:
            model.backbone = DeviceBackbone(
                b.config, b.schedule, b.weights, b.frequencies, b.engram, b.decoder_replay, b.block_size
            )
        model.start_drafting()
        session = Session(model, slots=3, capacity=96, seed=3)
        rng = np.random.default_rng(1)
        for slot in range(3):
            session.write(slot, 0, rng.integers(0, 64, 90).tolist())
        session.run(Chunk(0, 0, 21), Chunk(1, 0, 3))
        session.run(Chunk(0, 21, 1, prefill=False), Chunk(1, 3, 1, prefill=False), Chunk(2, 0, 2))
        session.run(Chunk(0, 22, 3, prefill=False, wanted=3), Chunk(1, 4, 1, prefill=False))
        found.append(torch.stack(tuple(session.cache.window[model.config.num_hidden_layers :])))
    expected, ours = (kv_gather(pool, torch.arange(len(pool)), "fp8", model.config.head_dim, torch.float32)
                      for pool in (records.flatten(0, -2) for records in found))  # fmt: skip
    assert (expected != 0).float().mean() > 0.05
    assert (ours != expected).float().mean() < 1e-3
    assert (ours - expected).abs().max() <= expected.abs().max() / 8


def decode_inputs(tokens: TokenBuffer, tables: dict[str, np.ndarray], lengths: list[int]) -> StepInputs:
    rows = len(lengths)
    ones, nothing = np.ones(rows, np.int32), np.zeros(rows, np.int32)
    plan = StepPlan(
        1, np.arange(rows), np.arange(rows)[::-1].astype(np.int32), np.array(lengths, np.int32) - 1, ones, nothing,
        np.ones(rows, bool), np.zeros(rows, bool), np.zeros(rows, bool), nothing, nothing, (),
    )  # fmt: skip
    return plan_inputs(plan, GROUPS, tables.__getitem__, tokens, {})


GROUPS = (CacheGroup("long", "prefix", 4, 8), CacheGroup("ring", "state", 4, 8), CacheGroup("wide", "prefix", 16, 8))


def test_a_packed_step_is_the_step_and_pads_harm_nobody() -> None:
    """As a captured graph reads it, twice over the same buffers: a longer step, then a shorter and smaller one."""
    tokens = TokenBuffer(5, 64, "cpu")
    tokens.data[:] = torch.arange(5 * 64).view(5, 64)
    rng = np.random.default_rng(0)
    tables = {group.name: rng.integers(1, 99, (5, 16), dtype=np.int32) for group in GROUPS}
    buffers = StepBuffers.of(StepMemory(GROUPS, 9, 96, "cpu"), 6, 64)
    for lengths in ([60, 7, 33, 1], [9, 20]):
        inputs = decode_inputs(tokens, tables, lengths)
        buffers.fill(inputs)
        batch, target = buffers.batch(tokens)
        expected, rows = device_batch(inputs, tokens, "cpu"), len(lengths)
        for name in ("token_ids", "positions", "seq_lens", "slots", "floors", "write_floors", "logit_rows"):
            found = getattr(batch, name)
            assert torch.equal(found[:rows], getattr(expected, name)), name
            assert found.dtype == getattr(expected, name).dtype, name
        for name, table in expected.block_tables.items():
            assert torch.equal(batch.block_tables[name][:rows, : table.shape[1]], table), name
            assert (batch.block_tables[name][rows:, : table.shape[1]] == 0).all(), name
        assert target.tolist() == [*(inputs.token_index + 1).tolist(), *[tokens.scratch] * (6 - rows)]
        assert batch.seq_lens[rows:].tolist() == [1] * (6 - rows)
        assert batch.token_ids[rows:].tolist() == [int(tokens.flat[tokens.scratch])] * (6 - rows)


def attention_batch(counts: list[int], starts: list[int], floors: list[int], block: int) -> ForwardBatch:
    rows, ends = len(counts), [s + c for s, c in zip(starts, counts, strict=True)]
    columns = -(-max(ends) // block)
    table = (1 + np.random.default_rng(0).permutation(rows * columns)).reshape(rows, columns).astype(np.int32)
    query_starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    positions = np.concatenate([np.arange(s, e) for s, e in zip(starts, ends, strict=True)])
    host = HostBatch(
        query_starts, np.array(ends, np.int32), np.arange(rows, dtype=np.int32), np.array(counts) > 1, np.zeros(rows, np.int32),
        np.array(floors, np.int32), np.zeros(rows, bool), np.arange(len(positions)), {GROUP: table},
        sum(count == 1 for count in counts),
    )  # fmt: skip
    put = torch.from_numpy
    return ForwardBatch(
        put(np.zeros(len(positions), np.int64)), put(positions), put(query_starts), put(host.seq_lens), put(host.slots),
        put(host.floors), put(host.write_floors), put(host.logit_rows), {GROUP: put(table)}, (),
        torch.zeros(1, 1, dtype=torch.int32), host,
    )  # fmt: skip


MIXED, DECODE = ([1, 1, 5, 6], [0, 12, 0, 3], [0, 0, 0, 5]), ([1, 1, 1, 1], [0, 12, 30, 3], [0, 0, 31, 0])
LONG = ([1, 1, 23, 2, 22], [0, 12, 0, 7, 3], [0, 0, 0, 0, 5])  # rows of more than 8 tokens are cut into pieces


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "normed", "rows"),
    [
        (heads, kv, dim, dim == 20, rows)
        for rows in (MIXED, DECODE, LONG)
        for heads, kv, dim in ((3, 1, 16), (4, 2, 20))
    ],
)
def test_paged_attention_is_the_portable_one(heads: int, kv_heads: int, dim: int, normed: bool, rows: tuple) -> None:
    """Steps of decode rows alone too, where a row below its write floor finds its key in the cache."""
    shape = AttentionShape(heads, kv_heads, dim, 4, torch.float32, "cpu")
    batch = attention_batch(*rows, 4)
    rope = rope_table(RopeConfig(dim), 64, "cpu")
    torch.manual_seed(heads)
    norms = (torch.rand(dim) + 0.5, torch.rand(dim) + 0.5) if normed else (None, None)
    blocks, history, qkv = 64, torch.randn(2, kv_heads, 64, 4, dim), torch.randn(sum(rows[0]), shape.qkv_width)
    portable, kernel = TorchAttention(shape), CudaAttention(shape)
    expected_cache, cache = portable.allocate(blocks), kernel.allocate(blocks)
    expected_cache.copy_(history)
    cache.copy_(history.permute(2, 0, 3, 1, 4))
    expected = portable(qkv.clone(), expected_cache, portable.prepare(batch, rope), *norms)
    found = kernel(qkv.clone(), cache, kernel.prepare(batch, rope), *norms)
    assert (found - expected).abs().max() < NEAR
    assert (cache - expected_cache.permute(2, 0, 3, 1, 4)).abs().max() < NEAR, "keys or values lie elsewhere"


def test_a_prompts_single_token_reads_what_another_row_writes_in_the_step() -> None:
    """Rows that share a prefix within a step (`SchedConfig.share_in_step`); the reader comes before the writer."""
    shape, rope = AttentionShape(3, 1, 16, 4, torch.float32, "cpu"), rope_table(RopeConfig(16), 64, "cpu")
    batch = attention_batch([1, 1], [19, 18], [0, 0], 4)
    table = batch.host.block_tables[GROUP]
    table[0] = table[1]
    batch = replace(batch, host=replace(batch.host, prefills=np.ones(2, bool)))
    torch.manual_seed(0)
    history, qkv = torch.randn(2, 1, 40, 4, 16), torch.randn(2, shape.qkv_width)
    portable, kernel = TorchAttention(shape), CudaAttention(shape)
    expected_cache, cache = portable.allocate(40), kernel.allocate(40)
    expected_cache.copy_(history)
    cache.copy_(history.permute(2, 0, 3, 1, 4))
    expected = portable(qkv.clone(), expected_cache, portable.prepare(batch, rope))
    assert (kernel(qkv.clone(), cache, kernel.prepare(batch, rope)) - expected).abs().max() < NEAR


def test_paged_attention_takes_lengths_from_the_device() -> None:
    """The host expects the drafts in another row and every sequence longer; the third row is a prompt's and exact."""
    shape, rope = AttentionShape(4, 2, 16, 4, torch.float32, "cpu"), rope_table(RopeConfig(16), 64, "cpu")
    batch = attention_batch([1, 3, 6], [9, 12, 3], [0, 0, 5], 4)
    starts, ends = np.array([0, 3, 4, 10], np.int32), batch.host.seq_lens + np.array([3, 1, 0], np.int32)
    loose = replace(batch, host=replace(batch.host, query_starts=starts, seq_lens=ends, num_decodes=0, block_tables={}))
    torch.manual_seed(0)
    history, qkv = torch.randn(2, 2, 40, 4, 16), torch.randn(10, shape.qkv_width)
    portable, kernel = TorchAttention(shape), CudaAttention(shape)
    expected_cache, cache = portable.allocate(40), kernel.allocate(40)
    expected_cache.copy_(history)
    cache.copy_(history.permute(2, 0, 3, 1, 4))
    expected = portable(qkv.clone(), expected_cache, portable.prepare(batch, rope))
    assert kernel.takes_bounds
    assert (kernel(qkv.clone(), cache, kernel.prepare(loose, rope)) - expected).abs().max() < NEAR
    assert (cache - expected_cache.permute(2, 0, 3, 1, 4)).abs().max() < NEAR, "keys or values lie elsewhere"


def test_shapes_that_the_kernels_refuse_say_why() -> None:
    refused = AttentionShape(4, 4, 8, 12, torch.float32, "cpu")
    assert shape_reason(refused) == "block_size 12 is no power of two"
    assert "head_dim 512" in str(shape_reason(AttentionShape(1, 1, 512, 16, torch.float32, "cpu")))


@pytest.mark.parametrize("rows", [1, 11, 12])
def test_small_layers_are_the_separate_ops(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of a row count: 11 rows at most take the kernel, more do not."""
    monkeypatch.setattr(cuda_products, "_MAX_ROWS", 11)
    separate, fused = SeparateProducts(rms_norm, silu_mul), FusedProducts(rms_norm, silu_mul)
    calls, dense = [], fused._kernels.dense_linear
    monkeypatch.setattr(
        fused._kernels, "dense_linear", lambda *args, **more: (calls.append(rows), dense(*args, **more))[1]
    )
    torch.manual_seed(rows)
    x, residual, norm = torch.randn(rows, 48), torch.randn(rows, 40), torch.rand(40) + 0.5
    down, up = CublasLinear(torch.randn(40, 48) * 48**-0.5), CublasLinear(torch.randn(64, 40) * 40**-0.5)
    for weight in (None, norm):
        expected, found = (ops.added(down, residual.clone(), x, weight) for ops in (separate, fused))
        assert (found.hidden - expected.hidden).abs().max() < NEAR
        assert (found.weighed is None) == (weight is None or rows > 11)
        for linear, name in ((up, "normed"), (up, "gated"), (TorchLinear(up.weight), "normed")):
            want, result = (getattr(o, name)(linear, s, norm, 1e-5) for o, s in ((separate, expected), (fused, found)))
            assert (result - want).abs().max() < NEAR, name
    assert len(calls) == (6 if rows <= 11 else 0), "a layer of another provider is called itself"


def test_widths_that_the_products_refuse_say_why() -> None:
    assert widths_reason(LayerWidths(576, 1536, 576, bias=False)) is None
    assert widths_reason(LayerWidths(576, 1536, 576, bias=True)) == "it adds no bias"
    assert "4096 and 14336 channels are wider" in str(widths_reason(LayerWidths(4096, 14336, 4096, bias=False)))
