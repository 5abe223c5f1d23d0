"""KV caches on the CPU take memory where they are written, whichever attention serves."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from deepinfer_offline.ops.attention.base import AttentionShape
from deepinfer_offline.ops.attention.portable import TorchAttention
from deepinfer_offline.ops.cpu.memory import cache_zeros, huge_zeros

STATM = Path("/proc/self/statm")
SHAPE = AttentionShape(num_heads=4, num_kv_heads=4, head_dim=64, block_size=32, dtype=torch.bfloat16, device="cpu")


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(STATM.read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not STATM.exists(), reason="resident memory is read from /proc")
def test_a_cache_takes_memory_where_it_is_written() -> None:
    blocks = (512 << 20) // SHAPE.block_bytes
    before = resident()
    cache = TorchAttention(SHAPE).allocate(blocks)
    assert cache.nbytes == 512 << 20
    # 64 MiB: what else of the process may grow meanwhile, far from the 512 MiB of the cache
    assert resident() - before < 64 << 20
    cache[:, :, 7] = 1  # a page of each of the 8 planes, 2 MiB if the system grants huge ones
    assert resident() - before < 64 << 20
    assert cache[:, :, 6:9].float().sum() == cache[:, :, 7].numel()
    cache.fill_(1)  # proof that the measure above sees the cache's memory
    assert resident() - before > 500 << 20


@pytest.mark.parametrize("shape", [(0, 4), (3,), (2, 5, 7), (1 << 20, 3)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_zeros_equal_those_of_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for made in (huge_zeros(shape, dtype), cache_zeros(shape, dtype, "cpu")):
        assert made.dtype == dtype
        assert torch.equal(made, torch.zeros(shape, dtype=dtype))
    assert cache_zeros(shape, dtype, torch.device("meta")).is_meta
