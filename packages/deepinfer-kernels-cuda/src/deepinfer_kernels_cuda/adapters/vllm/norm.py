"""RMS norm as vLLM rounds it: once before the weight, once after; the residual is added in float32 and written back.

`deepinfer_kernels_cuda.rms_norm` rounds once, which V4.1 asks for and which would change vLLM's tokens.
"""

from __future__ import annotations

import torch

from deepinfer_kernels_cuda.checks import require

MAX_CHANNELS = 16384


def can_serve(x: torch.Tensor, residual: torch.Tensor | None) -> bool:
    """Whether the kernel takes these tensors: a float type, rows that are dense, and room in one program."""
    fits = x.dtype in (torch.float32, torch.bfloat16, torch.float16) and 0 < x.shape[-1] <= MAX_CHANNELS
    if residual is None:
        return fits
    return fits and x.is_contiguous() and residual.is_contiguous() and residual.dtype == x.dtype


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """`round(x / sqrt(mean(x^2) + eps)) * weight` over the last dimension, float32 inside.

    Args:
        x: [..., n].
        weight: [n], or None for ones.
        eps: added to the mean square.

    Returns:
        A new tensor like x.
    """
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    _launch(rows, None, weight, out, eps)
    return out.view(x.shape)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float) -> None:
    """Write x + residual into `residual` and its norm, of the sum before it was rounded, into `x`.

    Args:
        x: [..., n], contiguous.
        residual: like x.
        weight: [n], or None for ones.
        eps: added to the mean square.
    """
    require(x.shape == residual.shape, f"x has shape {tuple(x.shape)}, the residual {tuple(residual.shape)}")
    n = x.shape[-1]
    _launch(x.view(-1, n), residual.view(-1, n), weight, x.view(-1, n), eps)


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, out: torch.Tensor, eps: float
) -> None:
    from deepinfer_kernels_cuda.adapters.vllm.norm_kernel import norm_kernel

    rows, n = x.shape
    require(weight is None or tuple(weight.shape) == (n,), f"the weight must have {n} channels")
    if rows:
        norm_kernel[(rows,)](
            x, x.stride(0), residual, weight, out, n, eps, HAS_RESIDUAL=residual is not None,
            HAS_WEIGHT=weight is not None, D=max(16, 1 << (n - 1).bit_length()),
            num_warps=1 if n <= 512 else 4 if n <= 4096 else 8,
        )  # fmt: skip
