# The kernel language is no Python that a type checker knows.
# pyrefly: ignore-errors
"""RMS norm with vLLM's rounding, one row a program."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm_kernel(x, x_stride, residual, weight, out, n, eps, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr,
                D: tl.constexpr):  # fmt: skip
    """Grid (rows,). residual and out are dense [rows, n]; out may be x."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, D)
    inside = channel < n
    value = tl.load(x + row * x_stride + channel, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + row * n + channel, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual + row * n + channel, value.to(residual.dtype.element_ty), mask=inside)
    value = value / tl.sqrt(tl.sum(value * value, 0) / n + eps)
    if HAS_WEIGHT:
        scale = tl.load(weight + channel, mask=inside, other=0.0)
        value = value.to(weight.dtype.element_ty).to(tl.float32) * scale.to(tl.float32)
    tl.store(out + row * n + channel, value.to(out.dtype.element_ty), mask=inside)
