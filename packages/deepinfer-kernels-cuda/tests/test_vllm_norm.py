"""The vLLM adapter's RMS norm against the formula in float64 and against vLLM's order of roundings, in Triton's interpreter."""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="run by test_interpreter.py, in a process of its own")
EPS = 1e-5
DTYPES = [torch.float32, torch.float16]  # the interpreter cuts bfloat16 instead of rounding it


@pytest.mark.skipif(INTERPRETED, reason="the interpreter replaces the compiler")
@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("residual", [True, False])
def test_compiles_for_bfloat16(arch: int, residual: bool) -> None:
    from deepinfer_kernels_cuda.adapters.vllm.norm_kernel import norm_kernel
    from deepinfer_kernels_cuda.aot import compile_kernel

    types = {"x": "*bf16", "x_stride": "i32", "weight": "*bf16", "out": "*bf16", "n": "i32", "eps": "fp32"}
    constants: dict[str, object] = {"HAS_RESIDUAL": residual, "HAS_WEIGHT": True, "D": 4096}
    if residual:
        types["residual"] = "*bf16"
    else:
        constants["residual"] = None
    _, report = compile_kernel(norm_kernel, types, constants, arch, divisible=("n",), num_warps=4)
    report.check()


def exact(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    x = x.double()
    y = x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt()
    return y if weight is None else y * weight.double()


def vllm_rounding(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Rounded to the weight's type before the weight is applied, and once more after it."""
    return (exact(x, None).to(weight.dtype).double() * weight.double()).to(x.dtype)


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@needs_interpreter
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_rounds_where_vllm_does(dtype: torch.dtype) -> None:
    from deepinfer_kernels_cuda.adapters.vllm import norm

    weight = draw(80, dtype=dtype)
    x = draw(3, 5, 96, dtype=dtype)[..., :80]  # heads inside a wider row, and no power of two
    found = norm.rms_norm(x, weight, EPS)
    if dtype == torch.float32:
        torch.testing.assert_close(found.double(), exact(x, weight), rtol=1e-5, atol=1e-6)  # a sum of 80 in float32
    else:  # equal but where the float32 sum falls on the other side of a rounding of float16
        assert (found != vllm_rounding(x, weight)).float().mean() < 0.01
    plain = norm.rms_norm(x, None, EPS)
    torch.testing.assert_close(plain.double(), exact(x, None), rtol=1e-3 if dtype == torch.float16 else 1e-5, atol=1e-6)


@needs_interpreter
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_residual_is_added_before_the_norm_and_kept(dtype: torch.dtype) -> None:
    from deepinfer_kernels_cuda.adapters.vllm import norm

    x, residual, weight = draw(7, 64, dtype=dtype), draw(8, 64, dtype=dtype)[1:], draw(64, dtype=dtype)
    total = x.double() + residual.double()
    norm.add_rms_norm(x, residual, weight, EPS)
    torch.testing.assert_close(residual, total.to(dtype), rtol=0, atol=0)
    expected = (exact(total, None).to(dtype).double() * weight.double()).to(dtype)  # of the sum before its rounding
    if dtype == torch.float32:
        torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-6)
    else:
        assert (x != expected).float().mean() < 0.01


@needs_interpreter
def test_no_rows_and_wrong_shapes() -> None:
    from deepinfer_kernels_cuda.adapters.vllm import norm
    from deepinfer_kernels_cuda.errors import ArgumentError

    assert norm.rms_norm(torch.empty(0, 64), torch.ones(64), EPS).shape == (0, 64)
    with pytest.raises(ArgumentError, match="64 channels"):
        norm.rms_norm(torch.ones(2, 64), torch.ones(32), EPS)


@needs_interpreter
def test_what_the_kernel_cannot_take_is_left_to_vllm() -> None:
    from deepinfer_kernels_cuda.adapters.vllm import norm

    x = torch.ones(4, 64)
    assert norm.can_serve(x, None)
    assert norm.can_serve(x, x.clone())
    assert not norm.can_serve(x, x.bfloat16())
    assert not norm.can_serve(torch.ones(4, 128)[:, :64], x)  # in place, so rows must be dense
    assert not norm.can_serve(torch.ones(1, norm.MAX_CHANNELS + 1), None)
    assert not norm.can_serve(x.double(), None)
