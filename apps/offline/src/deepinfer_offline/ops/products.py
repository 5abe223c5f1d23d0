"""The products of a layer with what surrounds them: a norm before; a residual or SwiGLU after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

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


class Stream(NamedTuple):
    """The residual between two products.

    Attributes:
        hidden: [T, width].
        weighed: what its provider left for the norm that comes next, or None.
    """

    hidden: torch.Tensor
    weighed: Any = None


class Products(Protocol):
    """How a layer multiplies."""

    def normed(self, linear: Linear, x: Stream, norm: torch.Tensor, eps: float) -> torch.Tensor:
        """linear(rms_norm(x)): [T, K] -> [T, N]."""
        ...

    def gated(self, linear: Linear, x: Stream, norm: torch.Tensor, eps: float) -> torch.Tensor:
        """silu(gate) * up of linear(rms_norm(x)): [T, K] -> [T, N / 2]."""
        ...

    def added(self, linear: Linear, residual: torch.Tensor, x: torch.Tensor, norm: torch.Tensor | None) -> Stream:
        """residual [T, N] + linear(x). The residual may be overwritten. `norm`: the weight of the next norm, if any."""
        ...


class SeparateProducts:
    """Each step is an op of its own."""

    def __init__(self, rms_norm: RmsNorm, silu_mul: SiluMul) -> None:
        self.rms_norm, self.silu_mul = rms_norm, silu_mul

    def normed(self, linear: Linear, x: Stream, norm: torch.Tensor, eps: float) -> torch.Tensor:
        return linear(self.rms_norm(x.hidden, norm, eps))

    def gated(self, linear: Linear, x: Stream, norm: torch.Tensor, eps: float) -> torch.Tensor:
        return self.silu_mul(self.normed(linear, x, norm, eps))

    def added(self, linear: Linear, residual: torch.Tensor, x: torch.Tensor, _norm: torch.Tensor | None) -> Stream:
        return Stream(linear.add_to(residual, x))


registry.register(Provider("products", "portable", "portable", anywhere, lambda: SeparateProducts))
