"""What a captured step leaves on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Replayed:
    """Overwritten by the next captured step, in the order of the stream: all captured steps work in the same memory.

    Attributes:
        logits: float32 [n, vocab], of the rows that draw; None if there are none.
        likeliest: int64 [n], the lowest index of each row's maximum; written to the token buffer already.
    """

    logits: torch.Tensor | None
    likeliest: torch.Tensor | None
