"""Operators for Ascend NPUs behind the same signatures as the other kernel packages. Holds none yet."""

from deepinfer_kernels_ascend.device import is_supported

__all__ = ["is_supported"]
