"""Linear layers: weights are packed once, then applied to any number of rows."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F

from deepinfer_offline.ops.registry import Provider, anywhere, registry


class Linear(Protocol):
    """y = x W^T + b for one packed weight."""

    weight: torch.Tensor
    """[N, K], as the implementation has packed it."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, K] -> [T, N]."""
        ...

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        """[T, K] -> float32 [T, N]; not rounded to the weight's dtype where the device can help it."""
        ...

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual [T, N] + x W^T + b. The residual may be overwritten."""
        ...


class TorchLinear:
    """`torch.nn.functional.linear` on the weight as it is.

    Args:
        weight: [N, K].
        bias: [N] or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).float()

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return residual + F.linear(x, self.weight, self.bias)


class OneDnnLinear:
    """oneDNN with the weight reordered once into the blocks its kernels read.

    A row's result does not depend on the rows beside it (bitwise), which keeps float32 output stable under batching.
    bfloat16 is multiplied by the processor's own bfloat16 instructions, where F.linear reorders the weight on every call.

    Args:
        weight: [N, K] on the CPU, bfloat16 or float32. Not kept.
        bias: [N] or None.
    """

    _TYPICAL_ROWS = 64  # oneDNN picks the block layout for a batch of about this size; other sizes still run

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._ops: Any = torch.ops.mkldnn
        self.weight = self._ops._reorder_linear_weight(weight.contiguous(), self._TYPICAL_ROWS)
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._ops._linear_pointwise(x, self.weight, self.bias, "none", [], "")

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).float()

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self._ops._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")


def onednn_reason(device: str, dtype: torch.dtype) -> str | None:
    """Why oneDNN does not serve linear layers here, or None."""
    if torch.device(device).type != "cpu":
        return "runs on the CPU only"
    if not torch.backends.mkldnn.is_available():
        return "this torch was built without oneDNN"
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return f"torch {torch.__version__} has no mkldnn._reorder_linear_weight"
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this processor has no bfloat16 instructions that oneDNN uses"
    if dtype not in (torch.bfloat16, torch.float32):
        return f"packs bfloat16 and float32 weights, not {dtype}"
    return None


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up.

    Args:
        gate_up: [T, 2 * width], gate first.

    Returns:
        [T, width], dtype of `gate_up`.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


registry.register(Provider("linear", "portable", "portable", anywhere, lambda: TorchLinear))
registry.register(Provider("linear", "onednn", "library", onednn_reason, lambda: OneDnnLinear, device="cpu"))
registry.register(Provider("silu_mul", "portable", "portable", anywhere, lambda: silu_mul))
