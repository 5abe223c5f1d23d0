"""Sparse attention against the portable ops, and against a twin in float64."""

from __future__ import annotations

import pytest
from kernel_kit import DEVICE, DTYPES, INTERPRET, MARKS, assert_near, kernels, poisoned_pool, portable, rand, torch

attention = pytest.importorskip("deepinfer_kernels_cuda.attention")
twin = pytest.importorskip("deepinfer_kernels_cuda.reference.attention")
pytestmark = MARKS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("t", "heads", "n", "w", "k"),
    [(3, 7, 512, 40, 33), (2, 16, 64, 16, 0), (5, 1, 128, 9, 3), (2, 22, 512, 128, 130)]
    + ([] if INTERPRET else [(33, 64, 512, 128, 512), (4, 128, 512, 128, 512), (1, 8, 512, 128, 512)])
    + ([] if INTERPRET else [(140, 64, 512, 128, 512), (133, 128, 512, 40, 550)]),  # with a last round of few queries
)
def test_sparse_mla_decode(t, heads, n, w, k, dtype) -> None:
    q, sink = rand(t, heads, n, dtype=dtype), rand(heads)
    sink[0] = -1e30  # no weight; the portable op makes a NaN of -inf where a row has no key
    window = poisoned_pool(300, "fp8", n, 256)
    slots = torch.randint(0, 256, (t, w), device=DEVICE)
    slots[0, ::2] = -1
    slots[-1] = -1
    extra = {}
    if k:
        extra["compressed_pool"] = poisoned_pool(700, "nvfp4", n, 600)
        chosen = torch.randint(0, 600, (t, k), device=DEVICE)
        chosen[0, 5:] = -1
        chosen[-1] = -1  # with the window above: a row without any key
        extra["compressed_slots"] = chosen
    want = portable.sparse_mla_decode(q.float(), window, slots, sink, scale=n**-0.5, **extra)
    sink[0] = -torch.inf
    out = kernels.sparse_mla_decode(q, window, slots, sink, scale=n**-0.5, **extra)
    assert_near(out, want, dtype)
    assert (out[-1] == 0).all()
    if not INTERPRET and dtype == torch.bfloat16 and n == 512:
        few = [build for build in attention.FEW if build.has_room(w, k)]
        for splits in (1, 2, 4, 8, *few):
            again, lse = kernels.sparse_mla_decode(
                q, window, slots.int(), sink, scale=n**-0.5, splits=splits, return_lse=True,
                **{key: value.int() if value.dtype == torch.int64 else value for key, value in extra.items()},
            )  # fmt: skip
            assert_near(again, want, dtype)
            assert torch.isposinf(lse[-1]).all()
            assert torch.isfinite(lse[:-1]).all()


@pytest.mark.skipif(INTERPRET, reason="the kernel for Hopper")
@pytest.mark.parametrize("sharpness", [1.0, 6.0, 40.0])
def test_sparse_mla_decode_where_maxima_rise(sharpness) -> None:
    """A row's reference moves only by 2^8 and more: never at sharpness 1, from tile to tile at 40."""
    t, heads, n = 9, 64, 512
    q, sink = (rand(t, heads, n) * sharpness).bfloat16(), rand(heads)
    window, extra = poisoned_pool(300, "fp8", n, 256), poisoned_pool(700, "nvfp4", n, 600)
    slots = torch.randint(0, 256, (t, 128), device=DEVICE).int()
    chosen = torch.randint(0, 600, (t, 512), device=DEVICE).int()
    pools = {"compressed_pool": extra, "compressed_slots": chosen}
    want, want_lse = twin.sparse_mla_decode(q, window, slots, sink, scale=n**-0.5, **pools)
    for splits in (1, 2, 4, 8):
        out, lse = kernels.sparse_mla_decode(
            q, window, slots, sink, scale=n**-0.5, splits=splits, return_lse=True, **pools
        )
        assert_near(out, want, torch.bfloat16)
        assert torch.allclose(lse.double(), want_lse, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("t", "heads", "n", "u", "k"), [(3, 5, 96, 50, 33), (2, 16, 64, 20, 16)])
def test_sparse_mla_prefill(t, heads, n, u, k, dtype) -> None:
    q, kv, sink = rand(t, heads, n, dtype=dtype), rand(u, n, dtype=dtype), rand(heads)
    indices = torch.randint(-1, u, (t, k), device=DEVICE)
    indices[0] = -1
    want = portable.sparse_mla_prefill(q.float(), kv.float(), indices, sink, scale=n**-0.5)
    out = kernels.sparse_mla_prefill(q, kv, indices, sink, scale=n**-0.5)
    assert_near(out, want, dtype)
    assert (out[0] == 0).all()
