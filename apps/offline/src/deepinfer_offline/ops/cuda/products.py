"""Small layers on CUDA: a product, the norm before it and the residual or SwiGLU after it are one kernel."""

from __future__ import annotations

from typing import Any

import torch

from deepinfer_offline.ops.cuda.linear import CublasLinear
from deepinfer_offline.ops.cuda.support import kernels
from deepinfer_offline.ops.linear import Linear
from deepinfer_offline.ops.products import LayerWidths, RmsNorm, SeparateProducts, SiluMul, Stream

_MAX_HIDDEN = 768
_MAX_INNER = 2048
"""Widths up to which the kernel was measured faster than cuBLAS with kernels around it."""
_MAX_ROWS = 1024
"""Rows up to which it was; more go the other way."""


def widths_reason(widths: Any) -> str | None:
    """Why layers of such widths are not served, or None."""
    if not isinstance(widths, LayerWidths):
        return None
    if max(widths.hidden, widths.attended) > _MAX_HIDDEN or widths.inner > _MAX_INNER:
        return f"layers of {widths.hidden} and {widths.inner} channels are wider than {_MAX_HIDDEN} and {_MAX_INNER}"
    return "it adds no bias" if widths.bias else None


class FusedProducts:
    """Few rows take one kernel a product, which leaves its result weighed for the next norm; many rows do not."""

    def __init__(self, rms_norm: RmsNorm, silu_mul: SiluMul) -> None:
        self._separate = SeparateProducts(rms_norm, silu_mul)
        self._kernels = kernels()

    @staticmethod
    def _serves(linear: Linear, x: torch.Tensor) -> bool:
        """A layer of another provider may keep its weight in another form: it is called."""
        return len(x) <= _MAX_ROWS and type(linear) is CublasLinear

    def normed(self, linear: Linear, x: Stream, norm: torch.Tensor, eps: float) -> torch.Tensor:
        if not self._serves(linear, x.hidden):
            return self._separate.normed(linear, x, norm, eps)
        return self._after_norm(linear, x, norm, eps)

    def gated(self, linear: Linear, x: Stream, norm: torch.Tensor, eps: float) -> torch.Tensor:
        if not self._serves(linear, x.hidden):
            return self._separate.gated(linear, x, norm, eps)
        return self._after_norm(linear, x, norm, eps, swiglu=True)

    def _after_norm(
        self, linear: Linear, x: Stream, norm: torch.Tensor, eps: float, *, swiglu: bool = False
    ) -> torch.Tensor:
        if x.weighed is None:
            return self._kernels.dense_linear(x.hidden, linear.weight, norm_weight=norm, eps=eps, swiglu=swiglu)
        return self._kernels.dense_linear(x.weighed, linear.weight, eps=eps, swiglu=swiglu)

    def added(self, linear: Linear, residual: torch.Tensor, x: torch.Tensor, norm: torch.Tensor | None) -> Stream:
        if not self._serves(linear, x):
            return self._separate.added(linear, residual, x, norm)
        weighed = None if norm is None else self._kernels.weighed_like(residual)
        self._kernels.dense_linear(x, linear.weight, residual=residual, out=residual, weighed=weighed, next_weight=norm)
        return Stream(residual, weighed)
