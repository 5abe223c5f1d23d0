"""Routing, experts and packed products against the portable ops."""

from __future__ import annotations

import pytest
from kernel_kit import DEVICE, DTYPES, INTERPRET, MARKS, assert_near, kernels, portable, rand, torch

pytestmark = MARKS


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
