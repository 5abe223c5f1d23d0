"""The capability table answers with reasons, names architectures, and never guesses for unknown ones."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import deepinfer_kernels_cuda as kernels  # noqa: E402
from deepinfer_kernels_cuda import capability  # noqa: E402
from deepinfer_kernels_cuda.attention import FEW, choose_few, choose_rest, choose_splits  # noqa: E402


def test_cpu_is_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "cpu is no CUDA device" in kernels.is_supported("router", "cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernels.is_supported("router", "cpu") is None


@pytest.mark.parametrize(("cuda", "said"), [("13.0", "no CUDA device answers"), (None, "built without CUDA")])
def test_a_machine_without_a_gpu_is_told_so(monkeypatch: pytest.MonkeyPatch, cuda, said) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert said in kernels.is_supported("router", "cuda")
    assert said in kernels.is_supported("router", "cuda:1", torch.bfloat16)


@pytest.mark.parametrize(
    ("arch", "supported"), [(90, True), (100, True), (80, False), (89, False), (103, False), (120, False)]
)
def test_architectures_are_named_not_compared(monkeypatch: pytest.MonkeyPatch, arch, supported) -> None:
    monkeypatch.setattr(capability, "device_arch", lambda device: arch)
    for op in capability.OPS:
        reason = capability.is_supported(op, "cuda")
        assert (reason is None) == supported
        if not supported:
            assert str(arch / 10) in reason
    row = {r.op: r for r in capability.capability_table("cuda")}["moe_experts"]
    assert row.kernel == ({90: "sm90", 100: "portable"}.get(arch))
    if arch == 100:
        assert row.note == "compiles for sm_100, not run"


def test_unknown_op_and_dtype() -> None:
    assert "unknown op" in kernels.is_supported("softmax", "cuda")
    assert "float16" in kernels.is_supported("router", "cuda", torch.float16)


def test_every_op_of_the_table_is_public() -> None:
    for op in capability.OPS:
        assert callable(getattr(kernels, op)), op
    for name in kernels.__all__:
        getattr(kernels, name)


def test_splits_fill_the_chip_once() -> None:
    assert choose_splits(64, 1, 10, 132) == 2
    assert choose_splits(128, 1, 10, 132) == 1
    assert choose_splits(32, 1, 10, 132) == 2, "31 clusters of four would not run at once"
    assert choose_splits(15, 2, 10, 132) == 4
    assert choose_splits(16, 1, 10, 132) == 4
    assert choose_splits(9, 1, 10, 132) == 4
    assert choose_splits(8, 1, 10, 132) == 8
    assert choose_splits(1, 1, 10, 132) == 8
    assert choose_splits(64, 1, 2, 132) == 2
    assert choose_splits(1, 1, 1, 132) == 1
    assert choose_splits(4096, 2, 10, 132) == 1


def test_a_last_round_of_few_queries_is_a_launch_of_its_own() -> None:
    assert choose_rest(4096, 1, 10, 132) == 4
    assert choose_rest(140, 1, 10, 132) == 8
    assert choose_rest(133, 2, 10, 132) == 1, "two blocks of heads make 266 items"
    assert choose_rest(512, 1, 10, 132) == 0, "116 of 132 blocks have work"
    assert choose_rest(132, 1, 10, 132) == 0
    assert choose_rest(66, 1, 10, 132) == 0, "there is no round before it"
    assert choose_rest(4096, 1, 2, 132) == 0, "a round of the window alone is shorter than a launch"


def test_few_queries_run_at_once_and_have_room() -> None:
    def builds(heads: int, *queries: int) -> list[tuple[int, int] | None]:
        chosen = [choose_few(n, heads, 128, 512, 132) for n in queries]
        return [few and (few.splits, few.heads) for few in chosen]

    assert builds(64, 1, 2, 3, 4, 5, 6, 7) == [(10, 16), (8, 16), (8, 16), (6, 16), (5, 16), (4, 16), (4, 16)]
    assert builds(64, 8, 9, 11, 12) == [(6, 32), (5, 32), (5, 32), None], "clusters that all run at once"
    assert builds(16, 7, 8, 30) == [(10, 16), (8, 16), (4, 16)]
    assert choose_few(2, 64, 128, 512, 66).splits == 6, "half the multiprocessors, half the clusters"
    assert choose_few(1, 64, 128, 528, 132).splits == 6, "room for 42 tiles, where ten blocks have it for 40"
    assert choose_few(1, 64, 128, 576, 132) is None
    small = choose_few(1, 64, 128, 512, 78, lambda few: few.splits <= 8)
    assert small is not None
    assert small.splits == 8, "a card whose groups of multiprocessors hold no cluster of ten"
    assert choose_few(1, 64, 640, 0, 132) == choose_few(1, 64, 0, 640, 132) == FEW[0]
    assert all(few.has_room(0, 0) and few.has_room(128, 512) for few in FEW)
    assert FEW[1].has_room(16 * 7, 16 * 33), "tiles of the two pools are dealt out from opposite ends"
    assert not FEW[1].has_room(16 * 9, 16 * 32)
