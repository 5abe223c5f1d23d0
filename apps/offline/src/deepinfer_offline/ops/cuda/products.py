"""Small layers on CUDA: a product, the norm before it and the residual or SwiGLU after it are one kernel."""

from __future__ import annotations

from typing import Any

import torch

from deepinfer_offline.ops.cuda.linear import CublasLinear
from deepinfer_offline.ops.cuda.support import kernels
from deepinfer_offline.ops.linear import Linear
from deepinfer_offline.ops.products import LayerWidths, RmsNorm, SeparateProducts, SiluMul

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


class FusedProducts(SeparateProducts):
    """Few rows take one kernel a product; many rows, as of prompts, are separate ops."""

    def __init__(self, rms_norm: RmsNorm, silu_mul: SiluMul) -> None:
        super().__init__(rms_norm, silu_mul)
        self._dense = kernels().dense_linear

    @staticmethod
    def _serves(linear: Linear, x: torch.Tensor) -> bool:
        """A layer of another provider may keep its weight in another form: it is called."""
        return len(x) <= _MAX_ROWS and type(linear) is CublasLinear

    def normed(self, linear: Linear, x: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
        if not self._serves(linear, x):
            return super().normed(linear, x, norm, eps)
        return self._dense(x, linear.weight, norm_weight=norm, eps=eps)

    def gated(self, linear: Linear, x: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
        if not self._serves(linear, x):
            return super().gated(linear, x, norm, eps)
        return self._dense(x, linear.weight, norm_weight=norm, eps=eps, swiglu=True)

    def added(self, linear: Linear, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if not self._serves(linear, x):
            return super().added(linear, residual, x)
        return self._dense(x, linear.weight, residual=residual, out=residual)
