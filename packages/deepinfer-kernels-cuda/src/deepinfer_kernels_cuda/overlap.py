"""Programmatic dependent launch: a kernel comes onto the chip while the one before it drains, and waits there for its end."""

from __future__ import annotations

from typing import Any

import torch

from .capability import device_arch


def overlap(device: torch.device) -> dict[str, Any]:
    """Launch options of kernels that begin with `gdc_wait` under `PDL`; empty where the hardware does not have it."""
    return {"PDL": True, "launch_pdl": True} if device_arch(device) in (90, 100) else {}
