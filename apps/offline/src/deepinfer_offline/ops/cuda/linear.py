"""Linear layers through cuBLAS, the residual added by the product itself."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class CublasLinear:
    """`y = x W^T + b`; the residual is accumulated into in place, which saves a pass over it and a rounding.

    Args:
        weight: [N, K] on a CUDA device.
        bias: [N] or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight.dtype == torch.float32:
            return self(x)
        product = torch.mm(x, self.weight.t(), out_dtype=torch.float32)
        return product if self.bias is None else product + self.bias

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if self.bias is not None:
            residual = residual + self.bias
        return residual.addmm_(x, self.weight.t())
