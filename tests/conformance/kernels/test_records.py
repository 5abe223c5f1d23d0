"""Cache records and everything of a row's own, from norms to the draft's step, against the portable ops."""

from __future__ import annotations

import pytest
from kernel_kit import DEVICE, DTYPES, INTERPRET, MARKS, assert_near, kernels, portable, rand, torch

pytestmark = MARKS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", ["fp8", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("n", [512, 128, 96])
def test_norm_rope_insert_and_gather(fmt, n, dtype) -> None:
    t, pairs = 9, 16
    values, weight = rand(t, n, dtype=dtype) * 3, rand(n, dtype=dtype)
    values[2] = 0
    slots = torch.tensor([3, 0, 7, -1, 11, 5, 1, -1, 9], device=DEVICE)
    table = portable.rotary_table(
        torch.arange(t, device=DEVICE) * 37, portable.rope_frequencies(2 * pairs, 1e4).to(DEVICE)
    )
    rotated = portable.apply_rope(portable.rms_norm(values, weight, 1e-6), table)
    for source, options in ((values, {}), (rotated, {"norm_weight": weight, "eps": 1e-6, "table": table})):
        pool = torch.full((13, portable.record_bytes(fmt, n)), 0xFF, dtype=torch.uint8, device=DEVICE)
        want = pool.clone()
        portable.kv_insert(want, slots, source, fmt)
        kernels.norm_rope_insert(pool, slots, values, fmt, **options)
        untouched = torch.ones(13, dtype=torch.bool, device=DEVICE)
        untouched[slots[slots >= 0]] = False
        assert (pool[untouched] == 0xFF).all()
        used = slots[slots >= 0]
        if not options:
            assert torch.equal(pool[used], want[used])
        got = kernels.kv_gather(pool, slots, fmt, n, torch.float32)
        expected = portable.kv_gather(want, slots, fmt, n, torch.float32)
        assert (got[3] == 0).all()
        # The norm's sum runs in another order: a value on a rounding edge may take the neighbouring code.
        assert ((got - expected).abs() > 1e-6).float().mean() < 0.01
        assert torch.equal(kernels.kv_gather(want, slots, fmt, n, torch.float32), expected)


@pytest.mark.skipif(INTERPRET, reason="CUDA C++")
@pytest.mark.parametrize("fmt", ["fp8", "nvfp4", "v4"])
@pytest.mark.parametrize(("norm", "turn", "page"), [(True, True, 1), (False, False, 64), (True, False, 48)])
def test_records_by_warps_are_the_same_bytes(fmt, norm, turn, page, monkeypatch) -> None:
    from deepinfer_kernels_cuda import records

    t, page = 1500, 64 if fmt == "v4" else page
    values = (rand(t, 704) * 3).bfloat16()[:, 64:576]  # rows that lie apart; 16 bytes aligned
    slots = torch.randperm(48 * page)[:t].to(DEVICE) if page > 1 else torch.randperm(3000)[:t].to(DEVICE)
    slots[::7] = -1
    options = {"norm_weight": rand(512).bfloat16(), "eps": 1e-20} if norm else {}
    if turn:
        options["table"] = (rand(t, 32).cos(), rand(t, 32).sin())
    size = page * (584 if fmt == "v4" else portable.record_bytes(fmt, 512))
    pools = [torch.full((48 if page > 1 else 3000, size), 0xFF, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    gathered = []
    for pool, least in zip(pools, (1, 1 << 30), strict=True):
        monkeypatch.setattr(records, "_WARP_ROWS", least)
        if fmt == "v4":
            kernels.v4_insert(pool, slots, values, page_size=page, **options)
            gathered.append(kernels.v4_gather(pool, slots, torch.bfloat16, page_size=page))
        else:
            view = pool.view(-1, page, size // page) if page > 1 else pool
            kernels.norm_rope_insert(view, slots, values, fmt, **options)
            gathered.append(kernels.kv_gather(view, slots, fmt, 512, torch.bfloat16))
    assert torch.equal(*pools)
    assert torch.equal(*gathered)
    assert (gathered[0][::7] == 0).all()
    assert gathered[0].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_norm_compress_engram(dtype) -> None:
    x, weight = rand(6, 5, 96, dtype=dtype), rand(96, dtype=dtype)
    table = portable.rotary_table(torch.arange(6, device=DEVICE) * 11, portable.rope_frequencies(32, 1e4).to(DEVICE))
    for inverse in (False, True):
        assert_near(kernels.rope(x, table, inverse=inverse), portable.apply_rope(x, table, inverse=inverse), dtype)
    again = kernels.rope(kernels.rope(x.clone(), table, inplace=True), table, inverse=True, inplace=True)
    assert_near(again, x, dtype)
    assert_near(kernels.rms_norm(x, weight, 1e-20), portable.rms_norm(x, weight, 1e-20), dtype)
    for ratio in (2, 3):
        values, gates = rand(4, ratio, 100), rand(4, ratio, 100) * 5
        assert_near(kernels.compress(values, gates), portable.compress(values, gates), torch.float32)
    codes = rand(50, 256).to(torch.float8_e4m3fn)
    scale = torch.randint(120, 130, (50, 8), dtype=torch.uint8, device=DEVICE).view(torch.float8_e8m0fnu)
    rows = torch.randint(0, 50, (7, 24), device=DEVICE)
    assert torch.equal(
        kernels.engram_gather(codes, scale, rows, dtype), portable.engram_gather(codes, scale, rows, dtype)
    )
    dense = rand(50, 72, dtype=dtype)
    assert torch.equal(
        kernels.engram_gather(dense, None, rows, dtype), portable.engram_gather(dense, None, rows, dtype)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_markov_step(dtype) -> None:
    base, embed, head = rand(3, 333), rand(333, 48, dtype=dtype), rand(333, 48, dtype=dtype)
    previous = torch.tensor([5, 332, 0], device=DEVICE)
    out, want = kernels.markov_step(base, previous, embed, head), portable.markov_step(base, previous, embed, head)
    assert_near(out.logits, want.logits, dtype)
    assert torch.equal(out.embedding, want.embedding)
