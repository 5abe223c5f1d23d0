# The kernel language is no Python that a type checker knows.
# pyrefly: ignore-errors
"""How a kernel begins that may come onto the chip before the one ahead of it has ended."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def begin(PDL: tl.constexpr):
    """Wait for everything that was enqueued before. PDL == 2 also lets the next kernel come, once every block has begun."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    if PDL == 2:
        tl.extra.cuda.gdc_launch_dependents()
