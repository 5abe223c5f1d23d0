# The kernel language is no Python that a type checker knows.
# pyrefly: ignore-errors
"""What comes back to a token from the ranks that own its experts."""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import begin


@triton.jit
def sum_placed_kernel(rows, places, out, ranks, width, BLOCK: tl.constexpr, PDL: tl.constexpr = False):
    """out[t] = sum over r of rows[places[t, r]] in float32, in the order of r; places below 0 are skipped."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for rank in range(ranks):
        place = tl.load(places + token * ranks + rank).to(tl.int64)
        total += tl.load(rows + place * width + column, mask=mask & (place >= 0), other=0.0).to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=mask)
