"""Calls into third-party libraries against fakes that have the released signatures and check what the real code checks.

Signatures: FlashMLA as vendored by vLLM 0.33, DeepGEMM 2.8 (`bf16_gemm_nt`), DeepEP V2 (`ElasticBuffer`). The libraries
themselves run on a GPU only: `tests/conformance/kernels`. Where vLLM is installed, the fakes' signatures are held against its
copies' sources.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from deepinfer_kernels_cuda import attention, capability, libraries, providers  # noqa: E402
from deepinfer_kernels_cuda.errors import ArgumentError, UnsupportedDeviceError  # noqa: E402
from deepinfer_kernels_cuda.layouts import V4  # noqa: E402
from deepinfer_kernels_cuda.parallel import ExpertParallel  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch):
    """Install a fake library and pretend to be on an architecture."""

    def install(name: str, arch: int, **functions):
        module = ModuleType(name)
        module.__dict__.update(functions)
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(libraries, "device_arch", lambda device: arch)
        providers.find_library.cache_clear()

    yield install
    monkeypatch.undo()
    providers.find_library.cache_clear()


def flash_mla_functions(seen: dict):
    def get_mla_metadata(*args, **kwargs):
        return SimpleNamespace(fresh=True), None

    def flash_mla_with_kvcache(
        q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, softmax_scale=None,
        causal=False, is_fp8_kvcache=False, indices: Any = None, attn_sink: Any = None, extra_k_cache: Any = None,
        extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None, out=None, enable_batch_invariant=False,
    ):  # fmt: skip
        b, s_q, heads, width = q.shape
        assert (s_q, width, head_dim_v) == (1, 512, 512)
        assert tile_scheduler_metadata.fresh
        assert (num_splits, block_table, cache_seqlens, causal, is_fp8_kvcache) == (None, None, None, False, True)
        assert k_cache.dtype == torch.uint8
        assert k_cache.dim() == 4
        assert k_cache.shape[2] == 1
        assert indices.dtype == torch.int32
        assert indices.shape[:2] == (b, 1)
        assert attn_sink is None or attn_sink.dtype == torch.float32
        for lists, cache in ((indices, k_cache), (extra_indices_in_kvcache, extra_k_cache)):
            if lists is not None:
                assert lists.shape[2] % 64 == 0  # the kernel refuses others
                assert lists.is_contiguous()
                assert -1 <= lists.min() <= lists.max() < cache.shape[0] * cache.shape[1]  # others are read unchecked
        assert all(stride % 8 == 0 for stride in q.stride()[:-1])
        seen.update(k_cache=k_cache, indices=indices, schedule=tile_scheduler_metadata)
        seen.update(extra=extra_k_cache, extra_indices=extra_indices_in_kvcache, scale=softmax_scale)
        return q.new_full((b, 1, heads, head_dim_v), 2.0), torch.zeros(b, heads, 1)

    def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink: Any = None, topk_length=None, out=None):
        t, heads, width = q.shape
        assert kv.shape[1:] == (1, width)
        assert kv.dtype == torch.bfloat16
        assert indices.dtype == torch.int32
        assert indices.shape[:2] == (t, 1)
        assert indices.shape[2] % 128 == 0
        assert d_v == 512
        assert attn_sink.dtype == torch.float32
        seen.update(indices=indices, scale=sm_scale)
        return q.new_full((t, heads, d_v), 3.0), torch.zeros(t, heads), torch.zeros(t, heads)

    return {
        "get_mla_metadata": get_mla_metadata, "flash_mla_with_kvcache": flash_mla_with_kvcache,
        "flash_mla_sparse_fwd": flash_mla_sparse_fwd,
    }  # fmt: skip


def test_flash_mla_reads_our_records(fake) -> None:
    seen: dict = {}
    fake("flash_mla", 100, **flash_mla_functions(seen))
    q, sink = torch.zeros(3, 64, 512, dtype=torch.bfloat16), torch.zeros(64)
    window, extra = torch.zeros(128, 528, dtype=torch.uint8), torch.zeros(4, 32, 288, dtype=torch.uint8)
    slots = torch.zeros(3, 128, dtype=torch.int64)
    out, lse = libraries.flash_mla_decode(
        q,
        window,
        slots,
        sink,
        scale=0.5,
        compressed_pool=extra,
        compressed_slots=slots[:, :7],
        page_size=32,
        return_lse=True,
    )
    assert out.shape == (3, 64, 512)
    assert lse.shape == (3, 64)
    assert seen["k_cache"].shape == (4, 32, 1, 528)
    assert seen["extra"].shape == (4, 32, 1, 288)
    assert seen["extra_indices"].shape == (3, 1, 64)
    assert (seen["extra_indices"][..., 7:] == -1).all()
    assert seen["scale"] == 0.5
    with pytest.raises(ArgumentError, match="64 or 128 heads"):
        libraries.flash_mla_decode(q[:, :7], window, slots, sink, scale=0.5)


def test_flash_mla_reads_planar_records(fake) -> None:
    seen: dict = {}
    fake("flash_mla", 90, **flash_mla_functions(seen))
    pool = torch.zeros(5, V4.page_bytes(64), dtype=torch.uint8)
    q, slots = torch.zeros(2, 128, 512, dtype=torch.bfloat16), torch.zeros(2, 16, dtype=torch.int32)
    slots[1, 3:6] = torch.tensor([5 * 64, -7, 5 * 64 - 1])
    assert libraries.flash_mla_decode_v4(q, pool, slots, torch.zeros(128), scale=1.0).shape == (2, 128, 512)
    assert seen["indices"][1, 0, 3:6].tolist() == [-1, -1, 5 * 64 - 1]
    assert seen["k_cache"].shape == (5, 64, 1, 584)
    assert seen["k_cache"].stride() == (V4.page_bytes(64), 584, 584, 1)
    schedule = libraries.flash_mla_schedule(CPU)
    extra = {"compressed_pool": pool[:3], "compressed_slots": slots[:, :0]}
    libraries.flash_mla_decode_v4(q, pool, slots, None, scale=1.0, schedule=schedule, **extra)
    assert seen["schedule"] is schedule
    assert seen["extra"].shape == (3, 64, 1, 584)
    assert seen["extra_indices"].shape == (2, 1, 64)
    none, lse = libraries.flash_mla_decode_v4(q[:0], pool, slots[:0], None, scale=1.0, return_lse=True)
    assert (none.shape, lse.shape) == ((0, 128, 512), (0, 128))
    with pytest.raises(ArgumentError, match="pool pages have 37376 bytes"):
        libraries.flash_mla_decode_v4(q, pool[:, : 64 * 584], slots, None, scale=1.0)
    with pytest.raises(UnsupportedDeviceError, match=r"built for 10\.0, not for compute capability 9\.0"):
        libraries.flash_mla_decode(q, pool, slots, None, scale=1.0)


def test_flash_mla_prefills_a_workspace(fake, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict = {}
    fake("flash_mla", 90, **flash_mla_functions(seen))
    wide = torch.zeros(5, 64, 520, dtype=torch.bfloat16)
    q, kv, sink = wide[..., 4:516], torch.zeros(40, 512, dtype=torch.bfloat16), torch.zeros(64).double()
    indices = torch.arange(5 * 130).view(5, 130) - 3
    out = attention.sparse_mla_prefill(q, kv, indices, sink, scale=0.25, kernel="flash_mla")
    assert (out == 3).all()
    assert seen["scale"] == 0.25
    assert seen["indices"].shape == (5, 1, 256)
    assert seen["indices"][0, 0, :5].tolist() == [-1, -1, -1, 0, 1]
    assert (seen["indices"][0, 0, 43:] == -1).all()
    assert (libraries.flash_mla_prefill(q, kv[:0], indices, sink, scale=1.0) == 0).all()
    # By default the faster one runs, measured once for a power of two of tokens; others than 64 or 128 heads are ours.
    asked: list = []
    monkeypatch.setattr(
        attention.measured, "choose", lambda key, ways, device: asked.append((key, set(ways))) or "flash_mla"
    )
    assert (attention.sparse_mla_prefill(q, kv, indices, sink, scale=0.25) == 3).all()
    assert asked == [(("sparse_mla_prefill", 8, 64, 130), {"portable", "flash_mla"})]
    assert "64 or 128 heads" in str(libraries.prefill_reason(q[:, :7], kv))
    assert libraries.prefill_reason(q, kv) is None
    assert libraries.prefill_reason(q.float(), kv.float()) is not None
    with pytest.raises(ArgumentError, match="allowed: portable, flash_mla"):
        attention.sparse_mla_prefill(q, kv, indices, sink, scale=0.25, kernel="flash")


def test_deep_gemm_product(fake) -> None:
    def bf16_gemm_nt(a, b, d, c=None, compiled_dims="nk"):
        assert a.dtype == b.dtype == torch.bfloat16
        assert d.dtype == torch.float32
        assert a.shape[1] == b.shape[1]
        assert d.shape == (a.shape[0], b.shape[0])
        d.copy_(a.float() @ b.float().t())

    fake("deep_gemm", 90, bf16_gemm_nt=bf16_gemm_nt)
    x, weight = torch.randn(5, 16).bfloat16(), torch.randn(7, 16).bfloat16()
    assert torch.equal(libraries.deep_gemm_product(x, weight), x.float() @ weight.float().t())


def test_an_unnamed_architecture_is_refused(fake) -> None:
    fake("deep_gemm", 120)
    for (library, op), archs in libraries.SUPPORT.items():
        reason = str(libraries.library_reason(library, op, CPU))
        assert "not for compute capability 12.0" in reason
        assert 120 not in archs
    assert "has no mega_moe" in str(libraries.library_reason("deep_gemm", "mega_moe", CPU))


def test_the_table_tells_every_copy_or_the_reason(fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    fake("flash_mla", 90, **flash_mla_functions({}), __version__="1.2")
    rows = {(row.library, row.op): row for row in libraries.library_table(CPU)}
    assert set(rows) == set(libraries.SUPPORT) | set(libraries.APART)
    assert rows["flash_mla", "sparse_mla_decode_v4"].copy == "flash_mla (flash_mla 1.2)"
    assert rows["flash_mla", "sparse_mla_decode_v4"].reason is None
    assert "built for 10.0" in str(rows["flash_mla", "sparse_mla_decode"].reason)
    assert "deep_ep: ModuleNotFoundError" in str(rows["deep_ep", "ExpertParallel"].reason)
    assert "its FP4 keys are for 10.0" in str(rows["deep_gemm", "indexer_logits"].reason)
    assert all((row.copy is None) == (row.reason is not None) for row in rows.values())
    for pair, archs in libraries.RAN.items():
        assert set(archs) <= set(libraries.SUPPORT[pair]) & set(capability.RUN_ON)


def test_libraries_can_be_left_out(fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_KERNELS_LIBRARIES", "deep_gemm, deep_ep")
    fake("flash_mla", 90, **flash_mla_functions({}))
    assert "not in DEEPINFER_KERNELS_LIBRARIES" in str(
        libraries.library_reason("flash_mla", "sparse_mla_decode_v4", CPU)
    )
    monkeypatch.setenv("DEEPINFER_KERNELS_LIBRARIES", "flash_mla")
    providers.find_library.cache_clear()
    assert libraries.library_reason("flash_mla", "sparse_mla_decode_v4", CPU) is None


def vllm_source(path: str) -> dict[str, ast.FunctionDef]:
    """Functions of a file of an installed vLLM by name, without an import (that needs a GPU's driver)."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    tree = ast.parse((Path(spec.origin).parent / path).read_text())
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def names(function: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in function.args.args]


def test_fakes_have_the_signatures_of_vllms_copies() -> None:
    theirs = vllm_source("third_party/flashmla/flash_mla_interface.py")
    for name, ours in flash_mla_functions({}).items():
        if name != "get_mla_metadata":
            assert list(inspect.signature(ours).parameters) == names(theirs[name])
    assert names(vllm_source("third_party/deep_gemm/_C.py")["bf16_gemm_nt"])[:3] == ["a", "b", "d"]


class ElasticBuffer:
    """One rank of DeepEP V2: everything stays here, two rows of padding behind what arrived."""

    def __init__(
        self, group, num_bytes=None, num_cpu_bytes=0, num_max_tokens_per_rank=0, hidden=0, num_topk=0,
        use_fp8_dispatch=False, deterministic=False, allow_hybrid_mode=True, allow_multiple_reduction=True,
        prefer_overlap_with_compute=True, sl_idx=3, num_allocated_qps=0, num_cpu_timeout_secs=300,
        num_gpu_timeout_secs=100, explicitly_destroy=False,
    ) -> None:  # fmt: skip
        assert deterministic
        self.shape = (num_max_tokens_per_rank, hidden, num_topk)

    def dispatch(
        self, x, topk_idx: Any = None, topk_weights: Any = None, cumulative_local_expert_recv_stats=None, num_experts=None,
        num_max_tokens_per_rank=None, expert_alignment=None, num_sms=0, num_qps=0, previous_event=None,
        previous_event_before_epilogue=None, async_with_compute_stream=False, allocate_on_comm_stream=False, handle=None,
        do_handle_copy=True, do_cpu_sync=None, do_expand=False, do_zero_padding=False, use_tma_aligned_col_major_sf=False,
    ):  # fmt: skip
        assert x.dtype == torch.bfloat16
        assert x.shape[1] == self.shape[1]
        assert topk_idx.dtype == torch.int64
        assert topk_weights.dtype == torch.float32
        assert topk_idx.shape[1] == self.shape[2]
        keep = (topk_idx >= 0).any(1)
        pad = lambda rows, value: torch.cat((rows[keep], torch.full_like(rows[:1], value).expand(2, -1)))  # noqa: E731
        count = torch.tensor([int(keep.sum())], dtype=torch.int32)
        handle = SimpleNamespace(psum_num_recv_tokens_per_scaleup_rank=count, keep=keep)
        return pad(x, 7.0), pad(topk_idx, 0), pad(topk_weights, 1.0), handle, None

    def combine(
        self, x, handle, topk_weights=None, bias=None, num_sms=0, num_qps=0, previous_event=None,
        previous_event_before_epilogue=None, async_with_compute_stream=False, allocate_on_comm_stream=False,
    ):  # fmt: skip
        count = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
        assert x.shape[0] == count + 2
        out = x.new_zeros(handle.keep.shape[0], x.shape[1])
        out[handle.keep] = x[:count]
        return out, None, None


def test_deep_ep_serves_the_same_contract(fake, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        fake("deep_ep", 90, ElasticBuffer=ElasticBuffer)
        ours = ExpertParallel(6)
        theirs = libraries.DeepEpParallel(6, max_tokens=16, hidden=8, top_k=2, device=CPU)
        x = torch.randn(5, 8).bfloat16()
        ids = torch.tensor([[0, 3], [-1, -1], [2, -1], [5, 1], [4, 0]])
        weights = torch.rand(5, 2)
        a, b = ours.dispatch(x, ids, weights), theirs.dispatch(x, ids, weights)
        for name in ("x", "ids", "weights"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name
        y = a.x * 2
        assert torch.equal(ours.combine(y, a.handle), theirs.combine(y, b.handle))
        with pytest.raises(ArgumentError, match="17 tokens; allowed: up to max_tokens, 16"):
            theirs.dispatch(torch.zeros(17, 8).bfloat16(), torch.zeros(17, 2, dtype=torch.int64), torch.zeros(17, 2))
    finally:
        torch.distributed.destroy_process_group()


def test_choices_are_kept_on_disk(tmp_path) -> None:
    path = tmp_path / "deep" / "choices.json"
    calls: list[str] = []
    candidates = {"a": lambda: calls.append("a"), "b": lambda: [0 for _ in range(100_000)] and calls.append("b")}
    assert providers.MeasuredChoice(path).choose(("op", 8), candidates, CPU) == "a"
    (entry,) = json.loads(path.read_text())
    assert "torch=" in entry
    assert "('op', 8)" in entry
    calls.clear()
    again = providers.MeasuredChoice(path)
    assert again.choose(("op", 8), candidates, CPU) == "a"
    assert calls == []
    assert set(again.timings["op", 8]) == {"a", "b"}
    # A candidate that was not there when it was measured: measured again.
    providers.MeasuredChoice(path).choose(("op", 8), candidates | {"c": lambda: calls.append("c")}, CPU)
    assert "c" in calls
    path.write_text("{half a fi")
    assert providers.MeasuredChoice(path).choose(("op", 8), candidates, CPU) == "a"


def test_capability_names_are_those_of_the_table() -> None:
    assert {arch for archs in libraries.SUPPORT.values() for arch in archs} <= set(capability.RUN_ON) | set(
        capability.COMPILED_FOR
    )
