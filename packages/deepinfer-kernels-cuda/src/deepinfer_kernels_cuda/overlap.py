"""Programmatic dependent launch: a kernel comes onto the chip while the one before it drains, and waits there for its end."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .capability import device_arch

OFF, DRAIN, EARLY = 0, 1, 2
#: How far kernels overlap: not at all; a kernel comes when the one before drains; as soon as every block of that one has begun.
MODE: int = DRAIN


def overlap(device: torch.device) -> dict[str, Any]:
    """Launch options of kernels that `begin` with `PDL`; empty where the hardware does not have it."""
    return _options(device, MODE)


@functools.lru_cache(maxsize=64)
def _options(device: torch.device, mode: int) -> dict[str, Any]:
    return {"PDL": mode, "launch_pdl": True} if mode and device_arch(device) in (90, 100) else {}


def overlaps(device: torch.device) -> bool:
    """Whether kernels that are launched in another way are to overlap with the one before too."""
    return MODE != OFF and device_arch(device) in (90, 100)
