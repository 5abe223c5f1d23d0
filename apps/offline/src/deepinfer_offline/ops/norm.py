"""RMS normalisation."""

from __future__ import annotations

import torch

from deepinfer_offline.ops.registry import Provider, anywhere, registry


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension, computed in float32.

    Args:
        x: [..., width].
        weight: [width], dtype of x.
        eps: added to the mean square.

    Returns:
        The shape and dtype of `x`. The normalised value is rounded to that dtype before it is scaled, as Llama does.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


registry.register(Provider("rms_norm", "portable", "portable", anywhere, lambda: rms_norm))
