"""Fused dense products against float64, on a GPU or in Triton's interpreter (`TRITON_INTERPRET=1`).

`test_interpreter.py` starts the interpreter, which is a process of its own: Triton reads the switch when it is imported.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from deepinfer_kernels_cuda.dense import Tiles, Weighed, dense_linear, weighed_like  # noqa: E402
from deepinfer_kernels_cuda.errors import ArgumentError  # noqa: E402

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
runs = pytest.mark.skipif(not INTERPRET and DEVICE == "cpu", reason="no CUDA device, and TRITON_INTERPRET is not 1")
EPS = 1e-3


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(7)


def wanted(x, weight, gain, residual, swiglu):
    y = x.double()
    if gain is not None:
        y = y / (y.square().mean(-1, keepdim=True) + EPS).sqrt() * gain.double()
    y = y @ weight.double().t()
    if swiglu:
        gate, up = y.chunk(2, -1)
        y = gate / (1 + (-gate).exp()) * up
    return y if residual is None else y + residual.double()


@runs
@pytest.mark.parametrize("kind", ["plain", "norm", "norm first", "add", "swiglu", "norm swiglu"])
@pytest.mark.parametrize(("t", "k", "n"), [(1, 64, 32), (5, 48, 40), (37, 80, 50)])
def test_product_with_its_surroundings(t, k, n, kind) -> None:
    # Rows and weights are windows of wider buffers; what lies between is NaN, and rows differ in size by powers of ten.
    x, weight = torch.full((t, k + 16), torch.nan, device=DEVICE), torch.full((n, k + 32), torch.nan, device=DEVICE)
    x, weight = x[:, :k], weight[:, 16 : 16 + k]
    x.copy_(torch.randn(t, k) * 10.0 ** torch.randint(-3, 2, (t, 1)))
    weight.copy_(torch.randn(n, k) * k**-0.5)
    gain = (torch.randn(k) + 1).to(DEVICE) if "norm" in kind else None
    residual = torch.randn(t, n).to(DEVICE) if kind == "add" else None
    swiglu = "swiglu" in kind
    want = wanted(x, weight, gain, residual, swiglu)
    tiles = Tiles(16, 16, 32, stages=2, norm=1 if kind == "norm first" else 2)
    # Scales of other rows would be off by powers of ten; float32 sums of 80 products are right to some 1e-6.
    for cut in (None, tiles, replace(tiles, rows=32, inputs=16)):
        found = dense_linear(x, weight, norm_weight=gain, eps=EPS, residual=residual, swiglu=swiglu, tiles=cut)
        assert (found - want).abs().max() <= 1e-5 * (1 + want.abs().max())


@runs
@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("cut", [None, Tiles(16, 16, 32, stages=2)])
def test_a_product_leaves_its_rows_for_the_norm_after_it(cut, swiglu) -> None:
    """Two products with a norm between them; the width is no multiple of a block's."""
    x, first, second = (torch.randn(*shape).to(DEVICE) for shape in ((21, 48), (40, 48), (24, 40)))
    residual, gain = (torch.randn(21, 40) * 10.0 ** torch.randint(-3, 2, (21, 1))).to(DEVICE), torch.rand(40).to(DEVICE)
    middle = wanted(x, first, None, residual, False)
    weighed = weighed_like(residual, cut)
    dense_linear(x, first, residual=residual, out=residual, weighed=weighed, next_weight=gain, tiles=cut)
    assert (residual - middle).abs().max() < 1e-5
    assert torch.equal(weighed.rows, residual * gain), "rounded once"
    found = dense_linear(weighed, second, eps=EPS, swiglu=swiglu, tiles=cut)
    want = wanted(middle, second, gain, None, swiglu)
    assert (found - want).abs().max() <= 1e-5 * (1 + want.abs().max())


@runs
def test_the_residual_may_be_the_result() -> None:
    x, weight, residual = (torch.randn(*shape).to(DEVICE) for shape in ((19, 32), (24, 32), (19, 24)))
    want = wanted(x, weight, None, residual, False)
    assert dense_linear(x, weight, residual=residual, out=residual) is residual
    assert (residual - want).abs().max() < 1e-5
    assert dense_linear(x[:0], weight).shape == (0, 24)


@runs
@pytest.mark.skipif(DEVICE == "cpu", reason="rounding of the matrix units: needs a GPU")
@pytest.mark.parametrize("t", [1, 8, 77, 256, 1000])
@pytest.mark.parametrize(("k", "n", "kind"), [(576, 960, "norm"), (576, 3072, "norm swiglu"), (1536, 576, "add")])
def test_bfloat16_on_a_gpu(t, k, n, kind) -> None:
    x, weight = torch.randn(t, k).bfloat16().to(DEVICE), (torch.randn(n, k) * k**-0.5).bfloat16().to(DEVICE)
    gain = (torch.rand(k) + 0.5).bfloat16().to(DEVICE) if "norm" in kind else None
    residual = torch.randn(t, n).bfloat16().to(DEVICE) if kind == "add" else None
    want = wanted(x, weight, gain, residual, "swiglu" in kind)
    found = dense_linear(x, weight, norm_weight=gain, eps=EPS, residual=residual, swiglu="swiglu" in kind)
    difference, size = found.double() - want, want.square().mean().sqrt()
    # Rounding the result is 1.7e-3 of a value (2^-9 / sqrt 3); SwiGLU's halves and its gate are rounded too.
    assert difference.square().mean().sqrt() / size < 6e-3
    assert difference.abs().max() / size < 0.2


@pytest.mark.parametrize(
    ("change", "word"),
    [({"weight": torch.ones(8, 16)}, "weight"), ({"norm_weight": torch.ones(3)}, "norm_weight"),
     ({"residual": torch.ones(2, 7)}, "residual"), ({"out": torch.ones(2, 7)}, "out"),
     ({"weighed": Weighed(torch.ones(2, 8), torch.ones(2, 1))}, "next_weight"),
     ({"norm_weight": torch.ones(64)[::2]}, "norm_weight"),
     ({"x": Weighed(torch.ones(2, 32), torch.ones(2, 1)), "norm_weight": torch.ones(32)}, "norm_weight"),
     ({"weighed": Weighed(torch.ones(2, 8), torch.ones(2, 9)), "next_weight": torch.ones(8)}, "parts"),
     ({"swiglu": True, "residual": torch.ones(2, 8)}, "swiglu"), ({"weight": torch.ones(8, 32).bfloat16()}, "weight")],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_named(change, word) -> None:
    with pytest.raises(ArgumentError, match=word):
        dense_linear(**({"x": torch.ones(2, 32), "weight": torch.ones(8, 32)} | change))
