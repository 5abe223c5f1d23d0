"""vLLM's layers with this package's kernels: what vLLM builds instead of its own once they are registered."""

from __future__ import annotations

from typing import Any

import torch
from vllm import envs
from vllm.model_executor.layers.layernorm import RMSNorm

from deepinfer_kernels_cuda.adapters.vllm import norm

NAMESPACE = "deepinfer_kernels"


# Custom ops, so that torch.compile sees one node and not the launcher of a Triton kernel.
@torch.library.custom_op(f"{NAMESPACE}::rms_norm", mutates_args=())
def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    return norm.rms_norm(x, weight, eps)


@rms_norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:  # noqa: ARG001
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.custom_op(f"{NAMESPACE}::add_rms_norm", mutates_args=("x", "residual"))
def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float) -> None:
    norm.add_rms_norm(x, residual, weight, eps)


class TritonRMSNorm(RMSNorm):
    """vLLM's RMSNorm, residual addition included, in one Triton kernel; what the kernel cannot do stays with vLLM."""

    @classmethod
    def enabled(cls) -> bool:
        """Yes: it was asked for by name, whatever vLLM's default for custom ops is."""
        return True

    def forward_cuda(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if self.variance_size_override is not None or envs.VLLM_BATCH_INVARIANT or not norm.can_serve(x, residual):
            return super().forward_cuda(x, residual)
        passed = self.pass_weight if residual is None else self.pass_weight_add
        weight = self.weight.data if passed else None
        if residual is None:
            return torch.ops.deepinfer_kernels.rms_norm(x, weight, self.variance_epsilon)
        torch.ops.deepinfer_kernels.add_rms_norm(x, residual, weight, self.variance_epsilon)
        return x, residual

    def forward_cpu(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        return self.forward_cuda(x, residual)  # in Triton's interpreter


#: Name of vLLM's layer class -> ours.
REPLACEMENTS: dict[str, Any] = {"RMSNorm": TritonRMSNorm}
