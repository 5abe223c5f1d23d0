"""RMS normalisation with float32 internals."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weight * x / sqrt(mean(x^2) + eps)` over the last dimension, computed in float32, cast once at the end.

    Args:
        x: float [..., n].
        weight: float [n].
        eps: added to the mean square; the released model uses 1e-20.

    Returns:
        [..., n] in x's dtype.
    """
    if x.dtype == torch.float32 and weight.dtype == torch.float32:
        return functional.rms_norm(x, weight.shape, weight, eps)
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)
