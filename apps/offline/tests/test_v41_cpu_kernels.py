"""The C kernels against the portable torch ops: records and selections bit for bit, Sinkhorn to float32 rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepinfer_offline.ops import deepsig as ops
from deepinfer_offline.ops.deepsig import cpu
from hypothesis import given, settings
from hypothesis import strategies as st

needs_kernels = pytest.mark.skipif(cpu.library() is None, reason=f"no C kernels here: {cpu.reason()}")


def portable(call: Callable[[], Any]) -> Any:
    """Run `call` as if there were no kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "serves", lambda *_: False)
        return call()


def special_values(channels: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(64, channels, generator=generator)
    rows[:8] = (rows[:8] * 4).round() / 4  # ties of E2M1
    rows[8] = 0
    rows[9] *= 1e-7
    rows[10] *= 1e4
    rows[11, ::3] = 0.0
    rows[12] = -0.0
    rows[13:20] *= torch.exp2(torch.randint(-12, 8, (7, 1), generator=generator).float())
    rows[20, 0] = 448.0
    rows[21] = torch.linspace(-(2**-6), 2**-6, channels)  # subnormal E4M3 codes
    return rows


@needs_kernels
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(["fp8", "nvfp4", "mxfp4"]), st.sampled_from([32, 48, 64, 512]))
def test_records_are_the_same_bytes(seed: int, fmt: Any, channels: int) -> None:
    values = special_values(channels, seed)
    records = ops.encode_records(values, fmt)
    assert torch.equal(records, portable(lambda: ops.encode_records(values, fmt)))
    slots = torch.randint(-1, 64, (5, 7), generator=torch.Generator().manual_seed(seed))
    read = ops.kv_gather(records, slots, fmt, channels, torch.float32)
    expected = portable(lambda: ops.kv_gather(records, slots, fmt, channels, torch.float32))
    assert torch.equal(read.view(torch.int32), expected.view(torch.int32))
    assert torch.equal(ops.round_to_record(values, fmt), portable(lambda: ops.round_to_record(values, fmt)))


@needs_kernels
@pytest.mark.parametrize("fmt", ["fp8", "nvfp4", "mxfp4"])
def test_every_stored_byte_decodes_the_same(fmt: Any) -> None:
    """All data bytes under several scale bytes, the NaN codes of E4M3 included."""
    width, channels = ops.record_bytes(fmt, 64), 64
    data = width - (2 if fmt != "nvfp4" else 4)
    pool = torch.zeros(256 * 4, width, dtype=torch.uint8)
    pool[:, :data] = torch.arange(256).repeat_interleave(4).to(torch.uint8)[:, None]
    pool[:, data:] = torch.tensor(
        [1, 119, 127, 254] if fmt != "nvfp4" else [1, 56, 126, 127], dtype=torch.uint8
    ).repeat(256)[:, None]
    slots = torch.arange(len(pool))
    read = ops.kv_gather(pool, slots, fmt, channels, torch.float32)
    expected = portable(lambda: ops.kv_gather(pool, slots, fmt, channels, torch.float32))
    assert torch.equal(read.isnan(), expected.isnan())
    assert torch.equal(read.nan_to_num(), expected.nan_to_num())


@needs_kernels
def test_insert_writes_the_same_pool() -> None:
    values, slots = torch.randn(6, 64), torch.tensor([3, -1, 0, 9, -1, 4])
    pools = [torch.full((10, ops.record_bytes("fp8", 64)), 7, dtype=torch.uint8) for _ in range(2)]
    ops.kv_insert(pools[0], slots, values, "fp8")
    portable(lambda: ops.kv_insert(pools[1], slots, values, "fp8"))
    assert torch.equal(*pools)


@needs_kernels
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 40), st.integers(1, 45), st.booleans())
def test_selections_are_the_same(seed: int, n: int, k: int, coarse: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(9, n, generator=generator)
    if coarse:
        scores = (scores * 2).round() / 2 * torch.randint(-1, 2, scores.shape, generator=generator)  # ties, 0 and -0
    scores[scores > 1.5] = -torch.inf
    assert torch.equal(ops.topk_lowest_index(scores, k), portable(lambda: ops.topk_lowest_index(scores, k)))
    assert torch.equal(ops.topk_mask(scores, k), portable(lambda: ops.topk_mask(scores, k)))


@needs_kernels
@pytest.mark.parametrize("streams", [1, 2, 4, 8])
@pytest.mark.parametrize("tokens", [1, 16, 37, 300])
@pytest.mark.parametrize("iterations", [1, 20])
def test_sinkhorn_is_the_same_to_rounding(streams: int, tokens: int, iterations: int) -> None:
    logits = torch.randn(tokens, streams, streams) * 3
    got = ops.sinkhorn(logits, iterations=iterations, eps=1e-6)
    expected = portable(lambda: ops.sinkhorn(logits, iterations=iterations, eps=1e-6))
    assert torch.allclose(got, expected, rtol=1e-5, atol=1e-6)


@needs_kernels
def test_nan_reaches_the_reader() -> None:
    values = torch.randn(3, 32)
    values[1, 5] = float("nan")
    for fmt in ("fp8", "nvfp4"):
        read = ops.round_to_record(values, fmt)
        assert read[1].isnan().any()
        assert not read[[0, 2]].isnan().any()


def test_kernels_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_CPU_KERNELS", "0")
    cpu._load.cache_clear()
    cpu.library.cache_clear()
    try:
        assert cpu.library() is None
        assert cpu.reason() == "switched off by DEEPINFER_CPU_KERNELS=0"
        assert not cpu.serves(torch.zeros(2))
    finally:
        monkeypatch.undo()
        cpu._load.cache_clear()
        cpu.library.cache_clear()
