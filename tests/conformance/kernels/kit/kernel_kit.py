"""What the tests of kernels share: where they run, in which types, random inputs, and how near results must be.

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
portable = pytest.importorskip("deepinfer_offline.ops.deepsig")

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32] if INTERPRET else [torch.float32, torch.bfloat16]
MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRET and DEVICE == "cpu", reason="no CUDA device, and TRITON_INTERPRET is not 1"),
]


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
