"""Every CUDA kernel against the portable op of the same name, in float32 and bfloat16.

On a GPU the real kernels run; without one, `TRITON_INTERPRET=1` runs the portable Triton kernels on the CPU (float32
only). Tolerances: float32 kernels differ from torch by summation order only (1e-5 of the largest value); bfloat16 results
carry one rounding of 2^-9 relative, so 2 % of the norm is far above noise and far below any wrong index or scale.
"""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
kernels = pytest.importorskip("deepinfer_kernels_cuda")
attention = pytest.importorskip("deepinfer_kernels_cuda.attention")
twin = pytest.importorskip("deepinfer_kernels_cuda.reference.attention")
portable = pytest.importorskip("deepinfer_offline.ops.deepsig")

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32] if INTERPRET else [torch.float32, torch.bfloat16]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRET and DEVICE == "cpu", reason="no CUDA device, and TRITON_INTERPRET is not 1"),
]


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(len(request.node.name) * 7919 + sum(map(ord, request.node.name)))


def rand(*shape: int, dtype=torch.float32):
    return torch.randn(*shape).to(DEVICE, dtype)


def assert_near(out, reference, dtype) -> None:
    out, reference = out.double(), reference.double()
    assert torch.isfinite(out).all()
    error = (out - reference).norm() / reference.norm().clamp_min(1e-30)
    assert error < (1e-5 if dtype == torch.float32 else 8e-3), f"relative error {error:.2e}"


def poisoned_pool(slots: int, fmt: str, channels: int, used: int):
    """A pool of NaN bytes whose first `used` records are written."""
    pool = torch.full((slots, portable.record_bytes(fmt, channels)), 0xFF, dtype=torch.uint8, device=DEVICE)
    portable.kv_insert(pool, torch.arange(used, device=DEVICE), rand(used, channels), fmt)
    return pool


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("t", "experts", "d", "m", "k"),
    [(7, 5, 96, 64, 3), (1, 4, 64, 32, 2), (40, 3, 64, 32, 2)]
    + ([] if INTERPRET else [(200, 8, 512, 320, 4), (64, 16, 5120, 2304, 6)])
    + ([] if INTERPRET else [(61, 8, 512, 320, 4), (150, 8, 320, 96, 4), (700, 6, 640, 448, 3)]),
)
def test_moe_experts(t, experts, d, m, k, dtype) -> None:
    def codes(rows: int, columns: int):
        data = torch.randint(-128, 128, (experts, rows, columns // 2), dtype=torch.int8, device=DEVICE)
        scale = torch.randint(116, 122, (experts, rows, columns // 32), dtype=torch.uint8, device=DEVICE)
        return data, scale.view(torch.float8_e8m0fnu)

    (gate_up, gate_up_scale), (down, down_scale) = codes(2 * m, d), codes(d, m)
    weights = portable.ExpertWeights(gate_up, down, gate_up_scale, down_scale)
    x = rand(t, d, dtype=dtype)
    ids = torch.stack([torch.randperm(experts)[:k] for _ in range(t)]).to(DEVICE)
    ids[t // 2 :, 0] = ids[-1, 0].clone()  # one expert with many tokens
    ids[t // 2 :, 1:][ids[t // 2 :, 1:] == ids[-1, 0]] = (ids[-1, 0] + 1) % experts
    gates = torch.rand(t, k).to(DEVICE)
    want = portable.moe_experts(x, ids, gates, weights, limit=3.0)
    assert_near(kernels.moe_experts(x, ids, gates, weights, limit=3.0), want, dtype)
    if dtype == torch.float32:
        assert not kernels.prepare_experts(weights, dtype=dtype).gate_up.packed
        with pytest.raises(kernels.ArgumentError, match=r"x has dtype torch\.float32"):
            kernels.moe_experts(x, ids, gates, kernels.prepare_experts(weights, kernel="sm90"), limit=3.0)
    else:
        prepared = kernels.prepare_experts(weights)
        assert_near(kernels.moe_experts(x, ids, gates, prepared, limit=3.0), want, dtype)
        if prepared.gate_up.packed:
            out = kernels.moe_experts(x, ids, gates, prepared, limit=3.0, kernel="decode_once")
            assert_near(out, want, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("t", "s", "d"),
    [(5, 4, 160), (1, 4, 64), (18, 2, 96)]
    + ([] if INTERPRET else [(300, 4, 5120), (17, 4, 5120), (515, 4, 5120), (3, 4, 4096), (4300, 4, 1024)]),
)
def test_mhc(t, s, d, dtype) -> None:
    streams, output = rand(t, s, d, dtype=dtype), rand(t, d, dtype=dtype)
    fn, base, scale = rand(s * (s + 2), s * d) * d**-0.5, rand(s * (s + 2)), rand(3)
    weight, options = rand(d, dtype=dtype), {"iterations": 20, "eps": 1e-6, "norm_eps": 1e-20}
    mix = portable.mhc_pre(streams, fn, base, scale, **options)
    ours = kernels.mhc_pre(streams, fn, base, scale, **options)
    for a, b in zip(ours, mix, strict=True):
        assert_near(a, b, torch.float32 if dtype == torch.float32 else dtype)
    new = portable.mhc_post(output, streams, mix.post, mix.comb)
    assert_near(kernels.mhc_post(output, streams, mix.post, mix.comb), new, dtype)
    assert_near(kernels.mhc_collapse(streams, mix.pre), portable.mhc_collapse(streams, mix.pre), dtype)
    step = kernels.mhc_step(streams, fn, base, scale, pre=mix.pre, norm_weight=weight, output=output, post=mix.post,
                            comb=mix.comb, **options)  # fmt: skip
    assert_near(step.streams, new, dtype)
    following = portable.mhc_pre(new, fn, base, scale, **options)
    for a, b in zip(step.mix, following, strict=True):
        assert_near(a, b, dtype)
    assert_near(step.x, portable.rms_norm(portable.mhc_collapse(new, mix.pre), weight, 1e-20), dtype)


@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [(3, 50, 7), (2, 5, 8), (4, 700, 512), (1, 3000, 40)]
    + ([] if INTERPRET else [(64, 65536, 512), (3, 16384, 2048), (2, 300001, 512), (3, 100000, 4096)]),
)
def test_topk_lowest_index(rows, n, k) -> None:
    scores = torch.randint(0, 6, (rows, n)).to(DEVICE, torch.float32) - 2  # many ties, zeros and negatives
    scores[0] = torch.randn(n, device=DEVICE)
    scores[-1, n // 2 :] = -torch.inf
    scores[-1, 0], scores[-1, 1] = -0.0, 0.0
    want = portable.topk_lowest_index(scores, k)
    assert torch.equal(kernels.topk_lowest_index(scores, k).long(), want.long())
    poisoned = scores.clone()
    lengths = torch.full((rows,), n // 2, dtype=torch.int32, device=DEVICE)
    poisoned[:, n // 2 :] = torch.nan
    want = portable.topk_lowest_index(scores[:, : n // 2], k)
    assert torch.equal(kernels.topk_lowest_index(poisoned, k, lengths).long(), want.long())
    if not INTERPRET:
        for each in (scores, scores.bfloat16(), torch.randn(rows, n, device=DEVICE), torch.ones_like(scores)):
            want = portable.topk_lowest_index(each.float(), k)
            assert torch.equal(kernels.topk_lowest_index(each, k).long(), want.long())
            assert torch.equal(kernels.topk_lowest_index(each, k, kernel="portable").long(), want.long())


def test_candidate_mask() -> None:
    scores = torch.randint(0, 5, (4, 203)).to(DEVICE, torch.float32)
    visible = torch.tensor([203, 1, 57, 0], device=DEVICE)
    scores.masked_fill_(torch.arange(203, device=DEVICE) >= visible[:, None], -torch.inf)
    want = portable.candidate_mask(scores[:3], visible[:3], blocks=6, block_size=8)
    out = kernels.candidate_mask(scores, visible, blocks=6, block_size=8)
    assert torch.equal(out[:3], want)
    assert not out[3].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("t", "heads", "n", "size"),
    [(3, 4, 128, 8), (2, 7, 64, 16), (5, 32, 128, 64)]
    + ([] if INTERPRET else [(4, 32, 128, 256), (66, 31, 128, 128), (3, 9, 128, 4), (2, 32, 128, 32)]),
)
def test_indexer_logits(t, heads, n, size, dtype) -> None:
    q = portable.round_to_record(rand(t, heads, n, dtype=dtype), "mxfp4")
    weights = rand(t, heads, dtype=dtype)
    entries = 5 * size
    flat = poisoned_pool(9 * size, "mxfp4", n, 8 * size)
    table = torch.stack([torch.randperm(8)[:5] for _ in range(2)]).to(DEVICE, torch.int32)
    rows = torch.randint(0, 2, (t,), device=DEVICE)
    visible = torch.randint(0, entries + 1, (t,), device=DEVICE, dtype=torch.int32)
    visible[0] = entries
    keys = portable.kv_gather(
        flat.view(-1, flat.shape[-1]),
        (table.long()[..., None] * size + torch.arange(size, device=DEVICE)).flatten(1),
        "mxfp4",
        n,
        dtype,
    )
    want = portable.indexer_logits(q[:, None], weights[:, None], keys[rows], visible[:, None])[:, 0]
    out = kernels.indexer_logits(q, weights, flat.view(9, size, -1), table, rows, visible, max_entries=entries)
    assert torch.equal(out.isinf(), want.isinf())
    finite = ~want.isinf()
    assert_near(out[finite], want[finite], dtype)
    if not INTERPRET and n == 128 and dtype == torch.bfloat16:
        # Exact products, rounded alike: the two kernels differ where the order of a sum decides a rounding, a few in 10^5.
        other = kernels.indexer_logits(
            q, weights, flat.view(9, size, -1), table, rows, visible, max_entries=entries, kernel="portable"
        )
        assert (other != out).float().mean() < 1e-3


@pytest.mark.parametrize(("low", "high"), [(118, 131), (60, 200), (150, 171)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_indexer_scales(low, high, dtype) -> None:
    """Groups that vanish beside others of their key, keys over 2^33, and a key whose scale is NaN, which spoils no other."""
    pool = torch.randint(0, 256, (3, 64, 68), dtype=torch.uint8)
    pool[..., 64:] = torch.randint(low, high, (3, 64, 4), dtype=torch.uint8)
    pool[1, 7, 65] = 255
    table, entries = torch.tensor([[2, 0, 1]], dtype=torch.int32), 180
    q, weights = torch.randn(2, 5, 128).to(dtype), torch.randn(2, 5).to(dtype)
    value = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.stack((pool[..., :64] & 15, pool[..., :64] >> 4), -1).view(3, 64, 4, 32).long()
    keys = torch.where(codes > 7, -1.0, 1.0) * value[codes & 7] * torch.exp2(pool[..., 64:].double() - 127)[..., None]
    keys = keys.view(3, 64, 128)[table[0].long()].reshape(192, 128)[:entries]
    terms = (q.double() @ keys.T).to(dtype).double().relu() * weights.double()[..., None]  # [t, heads, entries]
    out = kernels.indexer_logits(
        q.to(DEVICE), weights.to(DEVICE), pool.to(DEVICE), table.to(DEVICE), torch.zeros(2, dtype=torch.int32, device=DEVICE),
        torch.full((2,), entries, dtype=torch.int32, device=DEVICE), max_entries=entries,
    ).cpu()  # fmt: skip
    nan = torch.arange(entries) == 128 + 7
    # A product on the edge of two roundings may take either, and so may their sum: of each, half a unit in the last place.
    error = (out.double() - terms.sum(1)).abs()[:, ~nan]
    assert (error <= terms.abs().sum(1)[:, ~nan] * (1e-5 if dtype == torch.float32 else 2**-7)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("t", "experts", "d", "k"),
    [(5, 24, 96, 3), (1, 7, 64, 2), (33, 100, 64, 6)]
    + (
        []
        if INTERPRET
        else [
            (300, 384, 5120, 6),
            (100, 384, 1032, 8),
            (200, 384, 5120, 6),
            (64, 384, 5120, 6),
            (601, 384, 5120, 6),
            (1100, 384, 5120, 6),
            (16384, 384, 5120, 6),
            (4099, 192, 1032, 8),
            (9, 512, 640, 32),
            (5, 600, 64, 4),
            (520, 256, 512, 8),
        ]
    ),
)
def test_router(t, experts, d, k, dtype) -> None:
    x, weight, bias = rand(t, d, dtype=dtype), rand(experts, d, dtype=dtype) * d**-0.5, rand(experts) * 0.1
    ids, gates = kernels.router(x, weight, bias, k=k, normalise=True, scale=1.5)
    scores = torch.nn.functional.softplus(x.double() @ weight.double().T).sqrt()
    choice = scores + bias
    # Summation order may flip a near tie, so compare what was chosen with the k-th best choice, not the ids.
    assert (choice.gather(1, ids) >= choice.topk(k).values[:, -1:] - 1e-5).all()
    assert (ids.diff(dim=1) > 0).all()
    chosen = scores.gather(1, ids)
    assert_near(gates, chosen / chosen.sum(-1, keepdim=True) * 1.5, torch.float32)
    _, want = portable.router(x, weight, bias, k=k, normalise=True, scale=1.5)
    assert (gates.sum(-1) - want.sum(-1)).abs().max() < 1e-4
    ids, _ = kernels.router(torch.zeros_like(x), weight, torch.zeros_like(bias), k=k, normalise=True, scale=1.5)
    assert (ids == torch.arange(k, device=DEVICE)).all()  # all equal: the lowest ids
    # Few levels: a token's logits are the levels of its column, exactly.
    x, levels = (
        torch.eye(min(t, d), d, device=DEVICE, dtype=dtype),
        torch.randint(0, 4, (experts, d), device=DEVICE) - 1,
    )
    ids, _ = kernels.router(x, levels.to(dtype), torch.zeros_like(bias), k=k, normalise=True, scale=1.5)
    first = torch.sort(levels[:, : len(x)].T, dim=1, descending=True, stable=True).indices[:, :k]
    assert torch.equal(ids, first.sort(dim=1).values)
    # Twenty experts of a token are so near each other that keys of three digits would not tell them apart.
    rank = torch.rand(experts, d, device=DEVICE).argsort(0)
    near = torch.where(rank < 20, 0.5 + rank / 512, -4.0).to(dtype)
    ids, _ = kernels.router(x, near, torch.zeros_like(bias), k=k, normalise=True, scale=1.5)
    first = torch.sort(near[:, : len(x)].T.float(), dim=1, descending=True, stable=True).indices[:, :k]
    assert torch.equal(ids, first.sort(dim=1).values)


@pytest.mark.skipif(INTERPRET, reason="CUDA C++")
@pytest.mark.parametrize("t", [1, 3, 64, 200, 700])
@pytest.mark.parametrize("distance", [5120, 6400, 5121])
def test_router_reads_rows_wherever_they_lie(t, distance) -> None:
    """Rows of a wider matrix, at distances that bulk copies take and that they do not; the same choice each time."""
    wide = rand(t, distance, dtype=torch.bfloat16)
    x, weight, bias = wide[:, :5120], rand(384, 5120, dtype=torch.bfloat16) * 5120**-0.5, rand(384) * 0.1
    ids, gates = kernels.router(x, weight, bias, k=6, normalise=True, scale=1.5)
    choice = torch.nn.functional.softplus(x.double() @ weight.double().T).sqrt() + bias
    assert (choice.gather(1, ids) >= choice.topk(6).values[:, -1:] - 1e-5).all()
    assert (ids.diff(dim=1) > 0).all()
    for _ in range(3):
        again, same = kernels.router(x, weight, bias, k=6, normalise=True, scale=1.5)
        assert torch.equal(again, ids)
        assert torch.equal(same, gates)


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


@pytest.mark.parametrize("dtype", DTYPES)
def test_mx_linear(dtype) -> None:
    formats = pytest.importorskip("deepinfer_offline.ops.deepsig.formats")
    for t, n, k in ((5, 96, 64), (17, 160, 256)) if INTERPRET else ((5, 96, 64), (70, 1792, 5120), (300, 640, 1280)):
        codes, scale = formats.quantize_fp8_tiles(rand(n, k))
        x = rand(t, k, dtype=dtype)
        want = x.double() @ formats.dequantize_fp8_tiles(codes, scale).double().T
        natural = kernels.mx_weights(codes, scale, fp4=False)
        assert_near(kernels.mx_linear(x, natural), want, dtype)
        if dtype == torch.bfloat16:
            assert_near(kernels.mx_linear(x, kernels.pack_sm90(natural)), want, dtype)
