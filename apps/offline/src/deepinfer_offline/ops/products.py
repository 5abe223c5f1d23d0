"""The products of a layer with what surrounds them: a norm before; a residual or SwiGLU after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from deepinfer_offline.ops.linear import Linear
from deepinfer_offline.ops.registry import Provider, anywhere, registry

RmsNorm = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
SiluMul = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LayerWidths:
    """What a provider of `products` is asked about.

    Attributes:
        hidden: channels of the residual.
        inner: channels between the two halves of the MLP.
        attended: channels of the attention's result.
        bias: whether any of the products has one.
    """

    hidden: int
    inner: int
    attended: int
    bias: bool


class Products(Protocol):
    """How a layer multiplies."""

    def normed(self, linear: Linear, x: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
        """linear(rms_norm(x)): [T, K] -> [T, N]."""
        ...

    def gated(self, linear: Linear, x: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
        """silu(gate) * up of linear(rms_norm(x)): [T, K] -> [T, N / 2]."""
        ...

    def added(self, linear: Linear, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual [T, N] + linear(x). The residual may be overwritten."""
        ...


class SeparateProducts:
    """Each step is an op of its own."""

    def __init__(self, rms_norm: RmsNorm, silu_mul: SiluMul) -> None:
        self._rms_norm, self._silu_mul = rms_norm, silu_mul

    def normed(self, linear: Linear, x: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
        return linear(self._rms_norm(x, norm, eps))

    def gated(self, linear: Linear, x: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
        return self._silu_mul(self.normed(linear, x, norm, eps))

    def added(self, linear: Linear, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return linear.add_to(residual, x)


registry.register(Provider("products", "portable", "portable", anywhere, lambda: SeparateProducts))
