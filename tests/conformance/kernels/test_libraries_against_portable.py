"""Third-party kernels, where they are importable on a GPU, against the portable ops in float32 and float64.

Tolerances: attention rounds its weights and its result to bfloat16 (2^-9 each), 8e-3 of the norm as for our own kernels; the
product accumulates in float32, 1e-5. A library that is not there is skipped with the reason that the package gives.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
kernels = pytest.importorskip("deepinfer_kernels_cuda")
portable = pytest.importorskip("deepinfer_offline.ops.deepsig")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")]
SCALE = 512**-0.5


def need(library: str, op: str) -> None:
    reason = kernels.library_reason(library, op, DEVICE)
    if reason is not None:
        pytest.skip(reason)


def rand(*shape: int, dtype=torch.float32):
    return torch.randn(*shape).to(DEVICE, dtype)


def error(out, reference) -> float:
    assert torch.isfinite(out).all()
    out, reference = out.double(), reference.double()
    return float((out - reference).norm() / reference.norm().clamp_min(1e-30))


def planar_pool(pages: int, page: int, used: int):
    """A pool of NaN bytes whose first `used` planar records are written, its rows in float32."""
    size = -(-584 * page // 576) * 576
    pool = torch.full((pages, size), 0xFF, dtype=torch.uint8, device=DEVICE)
    slots = torch.arange(used, device=DEVICE)
    kernels.v4_insert(pool, slots, rand(used, 512).bfloat16(), page_size=page)
    return pool, kernels.v4_gather(pool, slots, torch.float32, page_size=page)


def draw(t: int, k: int, used: int):
    slots = torch.randint(0, used, (t, k)).to(DEVICE)
    slots[0, ::2] = -1
    if t > 1:
        slots[-1] = -1  # a row without any key
    return slots


def attend(q, rows, slots, sink):
    """The portable op in float32, and the natural log-sum-exp without the sink in float64."""
    out = portable.sparse_mla_prefill(q.float(), rows, slots, sink.clamp_min(-1e30), scale=SCALE)
    keys = rows.double()[slots.clamp_min(0)]
    logits = torch.einsum("thn,tkn->thk", q.double(), keys) * SCALE
    return out, logits.masked_fill((slots < 0)[:, None], -torch.inf).logsumexp(-1)


@pytest.mark.parametrize(
    ("t", "heads", "k", "m", "page"),
    [(3, 64, 40, 0, 64), (1, 64, 640, 0, 64), (33, 64, 128, 512, 64), (5, 128, 130, 33, 64), (64, 64, 128, 512, 2),
     (3, 64, 2, 0, 48), (200, 128, 64, 7, 64)],
)  # fmt: skip
def test_flash_mla_decode_v4(t, heads, k, m, page) -> None:
    need("flash_mla", "sparse_mla_decode_v4")
    q, sink = rand(t, heads, 512, dtype=torch.bfloat16), rand(heads)
    sink[0] = -torch.inf
    pool, rows = planar_pool(-(-900 // page), page, 700)
    slots, more = draw(t, k, 700), {}
    every, lists = rows, slots
    if m:
        pool2, rows2 = planar_pool(-(-500 // page), page, 400)
        slots2 = draw(t, m, 400)
        more = {"compressed_pool": pool2, "compressed_slots": slots2.int()}
        every, lists = torch.cat((rows, rows2)), torch.cat((slots, torch.where(slots2 < 0, -1, slots2 + 700)), 1)
    want, want_lse = attend(q, every, lists, sink)
    wild = torch.where(slots < 0, torch.full_like(slots, pool.shape[0] * page), slots)  # out of range is absent too
    for given in (slots, wild.int()):
        out, lse = kernels.flash_mla_decode_v4(q, pool, given, sink, scale=SCALE, return_lse=True, **more)
        assert error(out, want) < 8e-3
        seen = (lists >= 0).any(1)
        assert error(lse[seen], want_lse[seen]) < 1e-3
        assert (out[~seen] == 0).all()
        assert torch.isposinf(lse[~seen]).all()
    schedule = kernels.flash_mla_schedule(DEVICE)
    again = [kernels.flash_mla_decode_v4(q, pool, slots, sink, scale=SCALE, schedule=schedule, **more) for _ in "ab"]
    assert torch.equal(*again)
    assert error(again[0], want) < 8e-3


def test_flash_mla_decode_is_refused_or_right() -> None:
    """V4.1's records: read by FlashMLA's kernels for compute capability 10.0 only."""
    q, sink = rand(4, 64, 512, dtype=torch.bfloat16), rand(64)
    window = torch.full((256, 528), 0xFF, dtype=torch.uint8, device=DEVICE)
    portable.kv_insert(window, torch.arange(200, device=DEVICE), rand(200, 512), "fp8")
    slots = draw(4, 100, 200)
    reason = kernels.library_reason("flash_mla", "sparse_mla_decode", DEVICE)
    if reason is not None:
        with pytest.raises(kernels.UnsupportedDeviceError):
            kernels.flash_mla_decode(q, window, slots, sink, scale=SCALE)
        pytest.skip(reason)
    want = portable.sparse_mla_decode(q.float(), window, slots, sink, scale=SCALE)
    assert error(kernels.flash_mla_decode(q, window, slots, sink, scale=SCALE), want) < 8e-3


@pytest.mark.parametrize(("t", "heads", "k"), [(3, 64, 33), (70, 64, 640), (9, 128, 130), (1, 64, 2)])
def test_sparse_mla_prefill(t, heads, k) -> None:
    need("flash_mla", "sparse_mla_prefill")
    q, kv, sink = rand(t, heads, 512, dtype=torch.bfloat16), rand(900, 512, dtype=torch.bfloat16), rand(heads)
    kv[700:] = float("nan")  # never named below
    sink[1] = -torch.inf
    indices = draw(t, k, 700)
    want, _ = attend(q, kv[:700].float(), indices, sink)
    wild = torch.where(indices < 0, torch.full_like(indices, 900), indices)
    for given in (indices, wild.int()):
        out = kernels.sparse_mla_prefill(q, kv, given, sink, scale=SCALE, kernel="flash_mla")
        assert error(out, want) < 8e-3
        assert t == 1 or (out[-1] == 0).all()
    chosen = kernels.sparse_mla_prefill(q, kv, indices, sink, scale=SCALE)
    assert error(chosen, want) < 8e-3


@pytest.mark.parametrize("t", [1, 77, 4096])
def test_deep_gemm_product(t) -> None:
    need("deep_gemm", "product")
    from deepinfer_kernels_cuda.libraries import deep_gemm_product, product

    x, weight = rand(t, 5120, dtype=torch.bfloat16), rand(384, 5120, dtype=torch.bfloat16)
    want = x.double() @ weight.double().t()
    assert error(deep_gemm_product(x, weight), want) < 1e-5
    assert error(product(x, weight), want) < 1e-5


def test_every_library_is_served_or_refused_with_a_reason() -> None:
    for row in kernels.library_table(DEVICE):
        assert (row.reason is None) == (row.copy is not None)
        assert row.note or len(row.reason) > 10
