"""Memory of captured steps, as far as a CPU can show it: one room, inputs that all share, and the plan that has both."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from deepinfer_offline.engine.base import EngineStartError
from deepinfer_offline.engine.native import capture, graphs, memory
from deepinfer_offline.engine.native.capture import Recorder, ShortOfMemoryError
from deepinfer_offline.engine.native.graphs import row_buckets
from deepinfer_offline.engine.native.step_memory import StepMemory
from deepinfer_offline.models.base import CacheGroup, ModelOptions
from deepinfer_offline.models.deepsig_v41.model import DeepSigV41Model
from deepinfer_offline.models.llama.model import LlamaModel
from deepinfer_offline.ops.cuda import support
from deepinfer_specdec.dspark import DSparkConfig
from hypothesis import given
from hypothesis import strategies as st


class Device:
    """Stands for `torch.cuda`, as far as captures need it: a device of 1000 bytes, and a pool that a capture may grow."""

    def __init__(self) -> None:
        self.reserved, self.share, self.capturing, self.log = 100, 1.0, False, list[str]()

    def grow(self, size: int) -> None:
        """What torch's allocator does for a tensor that finds no free piece."""
        if self.reserved + size > self.share * 1000:
            raise torch.OutOfMemoryError(f"{size} bytes are too many")
        self.reserved += size

    def set_share(self, share: float, _device: str) -> None:
        self.share = share


class Graph:
    """Stands for `torch.cuda.CUDAGraph`, where a capture that failed cannot be ended in peace."""

    device: Device
    pools: list[object]

    def capture_begin(self, *, pool: object, capture_error_mode: str) -> None:
        self.pools.append(pool)
        self.device.capturing = True

    def capture_end(self) -> None:
        if self.device.capturing:
            raise RuntimeError("the capture was invalidated")

    def pool(self) -> tuple[int, int]:
        return 0, 1


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found, stream = Device(), SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr("torch.cuda.Stream", lambda _device: stream)
    monkeypatch.setattr("torch.cuda.current_stream", lambda _device: stream)
    monkeypatch.setattr("torch.cuda.stream", contextlib.nullcontext)
    monkeypatch.setattr("torch.cuda.CUDAGraph", Graph)
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda _device: found.reserved)
    monkeypatch.setattr("torch.cuda.get_per_process_memory_fraction", lambda _device: found.share)
    monkeypatch.setattr("torch.cuda.set_per_process_memory_fraction", found.set_share)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _device: (1000 - found.reserved, 1000))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _device: SimpleNamespace(total_memory=1001))
    monkeypatch.setattr(capture, "SPARE_BYTES", 20)
    monkeypatch.setattr(capture, "_make_workspace", lambda _device: None)
    monkeypatch.setattr(capture, "_unowned", lambda found: ("unowned", found))
    monkeypatch.setattr(Graph, "device", found, raising=False)
    monkeypatch.setattr(Graph, "pools", [], raising=False)
    empty = torch.empty

    def take(size: int, **_options: object) -> torch.Tensor:
        found.grow(size)
        found.capturing = False
        return empty(size, dtype=torch.uint8)

    monkeypatch.setattr(capture.torch, "empty", take)
    return found


def test_graphs_share_a_room_that_is_taken_at_the_start_and_may_grow_no_further(device: Device) -> None:
    recorder, calls = Recorder("cuda:0", 300), list[int]()
    assert (recorder.full, recorder.taken, device.reserved) == (False, 300, 400)

    def work(size: int) -> str:
        calls.append(size)
        device.grow(size)
        device.capturing = False
        return "hidden"

    recorded = recorder.record(lambda: work(15), warm_ups=0)
    assert recorded is not None
    assert recorded[1] == ("unowned", "hidden"), "what a graph returns keeps its memory from the others"
    assert recorder.record(lambda: work(6), warm_ups=0) is None, "21 bytes beyond the room"
    assert recorder.record(lambda: work(5), warm_ups=0) is not None, "a smaller one fits"
    assert (recorder.taken, recorder.limit, device.reserved) == (320, 320, 420)
    assert calls == [15, 6, 5]
    assert device.share == 1.0, "other memory is limited for good"
    assert Graph.pools == [None, (0, 1), (0, 1), (0, 1)]


def test_without_a_room_nothing_is_recorded(device: Device) -> None:
    recorder = Recorder("cuda:0", 901)
    assert recorder.full
    assert recorder.record(lambda: pytest.fail("it ran"), warm_ups=1) is None
    assert (device.reserved, device.share) == (100, 1.0)
    assert Recorder("cuda:0", 0).full


def test_what_is_wrong_with_a_step_is_not_taken_for_want_of_memory(device: Device) -> None:
    recorder = Recorder("cuda:0", 300)

    def work(said: str) -> None:
        raise RuntimeError(said)

    with pytest.raises(RuntimeError, match="illegal"):  # and not what ending its capture says
        recorder.record(lambda: work("an illegal access"), warm_ups=0)
    assert recorder.record(lambda: work("CUDA error: out of memory"), warm_ups=0) is None
    assert not recorder.full
    assert device.share == 1.0


def test_a_device_without_memory_for_the_step_itself_is_no_fault_of_the_graph(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    """Warm-ups may take all that the device has, and where that is not enough nothing was tried of a graph."""
    recorder, left = Recorder("cuda:0", 300), [0, 0, 15]

    def work(size: int) -> str:
        if not device.capturing:
            device.grow(size)
            device.reserved -= size
            return "warm"
        device.grow(left.pop())
        device.capturing = False
        return "hidden"

    with pytest.raises(ShortOfMemoryError, match="no memory is left on cuda:0 to run a step before its capture"):
        recorder.record(lambda: work(601), warm_ups=2)
    assert (recorder.taken, device.reserved, left, Graph.pools) == (300, 400, [0, 0, 15], [None])
    assert not caplog.records, "the graph's room was blamed"
    found = recorder.record(lambda: work(600), warm_ups=2)
    assert found is not None, "there is memory again, more than graphs may have"
    assert (recorder.taken, device.reserved) == (315, 415)
    with pytest.raises(RuntimeError, match="illegal"):
        recorder.record(lambda: pytest.fail("it ran") if device.capturing else _break(), warm_ups=1)


def _break() -> None:
    raise RuntimeError("an illegal access")


def test_a_graphs_memory_is_seen_without_being_owned() -> None:
    """As numpy reads the interface that torch reads on a device."""
    tensor = torch.arange(6, dtype=torch.float32).view(2, 3)
    described = capture._Memory(tensor).__cuda_array_interface__
    seen = np.asarray(SimpleNamespace(__array_interface__={**described, "version": 3})).view(np.float32)
    tensor[1, 2] = 9
    assert seen.tolist() == [0, 1, 2, 3, 4, 9]


GROUPS = (CacheGroup("long", "prefix", 4, 8), CacheGroup("ring", "state", 4, 8), CacheGroup("wide", "prefix", 16, 8))


@given(st.integers(1, 40), st.integers(1, 200), st.data())
def test_a_groups_table_begins_where_it_does_in_every_step(rows: int, limit: int, data: st.DataObject) -> None:
    held = StepMemory(GROUPS, rows, limit, "cpu")
    assert StepMemory.num_bytes(GROUPS, rows, limit) == held.packed.nbytes + held.tables.nbytes
    few, short = data.draw(st.integers(1, rows)), data.draw(st.integers(1, limit))
    for number, (name, table) in enumerate(held.views(rows, limit).items(), 1):
        part = held.views(few, short)[name]
        assert table.data_ptr() == part.data_ptr()
        assert table.data_ptr() % 16 == held.tables.data_ptr() % 16
        table.fill_(number)
        assert part.shape == (few, held.layout(short)[number - 1, 1])
    for number, table in enumerate(held.views(rows, limit).values(), 1):
        assert (table == number).all(), "two groups overlap"
    columns = sum(table.shape[1] for table in held.views(1, limit).values())
    assert len(held.packed) >= 1 + len(GROUPS) + rows * (4 + columns), "a decode step does not fit"


class HostMemory(StepMemory):
    """Is on the host, whatever device it is for."""

    def __init__(self, groups: Sequence[CacheGroup], rows: int, limit: int, _device: str) -> None:
        super().__init__(groups, rows, limit, "cpu")


class Captured:
    """A model whose decode steps are captured."""

    def __init__(self, graph_bytes: int) -> None:
        self.options: Any = SimpleNamespace(device="cuda:0", max_running=4, max_model_len=64)
        self.facts: Any = SimpleNamespace(cache_groups=GROUPS, graph_bytes=graph_bytes, graph_branch_bytes=7)

    def capture_limit(self, rows: int, longest: int) -> int:
        return longest


def test_the_plan_has_what_captured_steps_will_take(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "kernels", lambda: device)
    monkeypatch.setattr(graphs, "StepMemory", HostMemory)
    monkeypatch.setattr(graphs, "SPARE_BYTES", 20)
    tokens: Any = SimpleNamespace(scratch=1)
    model: Any = Captured(300)
    planned = graphs.planned_bytes(type(model), model.facts, model.options)
    made = graphs.make_graphs(model, None, tokens)
    assert made is not None
    assert made.num_bytes == planned == 320 + StepMemory.num_bytes(GROUPS, 4, 64)
    none: Any = Captured(0)
    assert graphs.planned_bytes(type(none), none.facts, none.options) == 0
    assert graphs.make_graphs(none, None, tokens) is None


def test_steps_are_not_captured_where_their_inputs_could_not_say_a_tokens_place(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "StepGraphs", lambda *_parts: "graphs")
    monkeypatch.setattr(graphs, "kernels", lambda: device)
    model: Any = Captured(300)
    for places, captured in ((2**31 - 1, True), (2**31, False)):
        tokens: Any = SimpleNamespace(scratch=places)
        assert (graphs.make_graphs(model, None, tokens) is not None) == captured


def test_the_cache_has_what_all_else_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda _device: 1000)
    facts: Any = SimpleNamespace(weight_bytes=300, workspace_bytes=100)
    without, left = (memory.choose_kv_bytes(facts, "cuda:0", None, buffers) for buffers in (0, 200))
    assert without / 600 == left / 400
    assert memory.choose_kv_bytes(facts, "cuda:0", 400, 200) == 400
    with pytest.raises(EngineStartError, match=r"buffers and captured steps 200 B \(less with .* or --max-model-len\)"):
        memory.choose_kv_bytes(facts, "cuda:0", 401, 200)


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel runs on every CUDA device."""
    monkeypatch.setattr(support, "reason", lambda _op, device, _dtype: None if device == "cuda:0" else "no CUDA device")


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize(("running", "step_tokens"), [(1000, 16384), (1000, 1000), (1, 8)])
def test_llama_says_what_its_captured_steps_need(running: int, step_tokens: int) -> None:
    """At least what lives at once: between an MLP's products, and where logits are made; at most twice that."""
    options = ModelOptions("cuda:0", torch.bfloat16, 8192, running, step_tokens, 32)
    found = LlamaModel.describe(LLAMA, options).graph_bytes
    mlp = step_tokens * 2 * (2 * 4096 + 3 * 14336)
    logits = running * (2 * 4096 + 4 * 128256)
    assert max(mlp, logits) <= found <= 2 * max(mlp, logits)
    for other in (replace(options, device="cpu"), replace(options, block_size=48)):
        assert LlamaModel.describe(LLAMA, other).graph_bytes == 0, "no attention that a graph can repeat"


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize(("running", "step_tokens"), [(1000, 16384), (1000, 1000), (1, 8)])
def test_llama_with_a_draft_says_what_its_captured_steps_need(running: int, step_tokens: int, tmp_path: Path) -> None:
    """Also tapped features, apart and together; and beside logits a slab of the draft's context, gathered and put together."""
    draft = DSparkConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=2, num_heads=32, num_kv_heads=8,
        head_dim=128, taps=(1, 15, 29), num_target_layers=32, block_size=5, mask_token_id=0,
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(draft.to_dict()))
    options = ModelOptions("cuda:0", torch.bfloat16, 8192, running, step_tokens, 32, tmp_path)
    facts = LlamaModel.describe(LLAMA, options)
    mlp = step_tokens * 2 * (2 * 4096 + 3 * 14336 + 2 * 3 * 4096)
    context = 2 * 2 * min(1 << 25, running * 8192 * 2 * 8 * 128)
    logits = running * (2 * 4096 + 4 * 128256)
    assert max(mlp, logits + context) <= facts.graph_bytes <= 2 * max(mlp, logits + context)
    plain = LlamaModel.describe(LLAMA, replace(options, draft=None))
    verified = running * 5 * 4 * 128256
    assert facts.workspace_bytes - plain.workspace_bytes >= verified + context, (
        "logits of all drafts that a step verifies"
    )


V41: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "v41-slice" / "config.json").read_text())
V41_OPTIONS = ModelOptions("cuda:0", torch.bfloat16, 1 << 16, 300, 16384, 64)


@pytest.mark.usefixtures("served")
def test_v41_says_what_its_captured_steps_need() -> None:
    """Decode steps alone are captured: their rows, not a step's tokens, and scores of the longest sequence for each."""
    facts = DeepSigV41Model.describe(V41, V41_OPTIONS)
    few = DeepSigV41Model.describe(V41, replace(V41_OPTIONS, max_step_tokens=300))
    vocab = V41["text_config"]["vocab_size"]
    assert facts.graph_bytes == few.graph_bytes > 300 * 4 * (vocab + (1 << 16))
    assert facts.graph_bytes < facts.workspace_bytes / 8
    assert 256 * 4 * (1 << 16) < facts.graph_branch_bytes < facts.graph_bytes / 2, "up to 256 rows have a branch"


@pytest.mark.parametrize(
    ("running", "longest"), [(1, 1 << 20), (8, 1 << 20), (32, 1 << 20), (256, 1 << 20), (1000, 1 << 18)]
)
@pytest.mark.usefixtures("served")
def test_v41_has_room_for_what_captured_steps_score(running: int, longest: int) -> None:
    """A float32 score and two bool masks of every entry, in all rows as many as in the longest: up to 256 rows aside."""
    options = replace(V41_OPTIONS, max_running=running, max_model_len=longest)
    facts, short = (DeepSigV41Model.describe(V41, replace(options, max_model_len=m)) for m in (longest, 1))
    branch = facts.graph_branch_bytes - short.graph_branch_bytes
    room = facts.graph_bytes - short.graph_bytes - branch
    model: Any = SimpleNamespace(options=options, backbone=SimpleNamespace(captures=True))
    served = set[tuple[int, int]]()
    for rows in row_buckets(running):
        for held in (1, 1000, 1 << 16, 1 << 17, 200_000, longest):
            limit = DeepSigV41Model.capture_limit(model, rows, held)
            if limit is not None:
                served.add((rows, held))
                assert 6 * rows * limit <= (branch if rows <= 256 else room) + 6 * running, (rows, held)
    assert {(rows, 1 << 17) for rows in row_buckets(running)} | {(1, longest), (min(running, 32), longest)} <= served
    assert not served & {(256, 1 << 20), (1000, 200_000)}


@pytest.mark.parametrize("longest", [1 << 12, 1 << 17, 1 << 20])
@pytest.mark.usefixtures("served")
def test_v41_has_room_for_a_prompts_step_at_any_length(longest: int) -> None:
    """What grows with the context: scores of a slab, and for all rows which blocks are candidates, in parts and put together."""
    facts, short = (DeepSigV41Model.describe(V41, replace(V41_OPTIONS, max_model_len=m)) for m in (longest, 1))
    rows, blocks = V41_OPTIONS.max_step_tokens, longest // V41["text_config"]["candidate_block_size"]
    slab = min(rows, (1 << 28) // longest) * longest
    grown = facts.workspace_bytes - short.workspace_bytes
    assert slab * (4 + 1) + 2 * rows * blocks <= grown + 8 * rows <= slab * 8 + 3 * rows * blocks


@pytest.mark.usefixtures("served")
def test_v41_plans_no_captured_steps_where_none_will_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """They read packed FP4 experts, by kernels that take the model's shape: a checkpoint may have others, a device none."""
    plain = {name: value for name, value in V41.items() if name != "quantization_config"}
    wide = {**V41, "text_config": {**V41["text_config"], "index_topk": 8192}}
    for raw in (plain, wide):
        assert graphs.planned_bytes(DeepSigV41Model, DeepSigV41Model.describe(raw, V41_OPTIONS), V41_OPTIONS) == 0
    facts = DeepSigV41Model.describe(V41, V41_OPTIONS)
    assert graphs.planned_bytes(DeepSigV41Model, facts, V41_OPTIONS) > facts.graph_bytes > 0
    monkeypatch.setattr(support, "reason", lambda *_asked: "no CUDA device answers")
    assert DeepSigV41Model.describe(V41, V41_OPTIONS).graph_bytes == 0


@pytest.mark.usefixtures("served")
def test_v41_states_packed_experts_where_kernels_read_them() -> None:
    """Few experts are unpacked at load, but not for kernels that read them packed."""
    text = {**V41["text_config"], "n_routed_experts": 8, "dspark_n_routed_experts": 8}
    raw = {**V41, "text_config": text}
    on_cuda, on_cpu = (
        DeepSigV41Model.describe(raw, replace(V41_OPTIONS, device=device)).weight_bytes for device in ("cuda:0", "cpu")
    )
    stages = text["num_hidden_layers"] + text["num_nextn_predict_layers"]
    values = 3 * text["hidden_size"] * text["moe_intermediate_size"] * 8 * stages
    assert on_cpu - on_cuda == values * (2 - 1 / 2 - 1 / 32), "FP4 with a scale for 32 values instead of bfloat16"
