"""Masks of many sequences at once: at first in the calling thread, then on the threads of the grammar library."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import numpy as np

from deepinfer_structured.bitmask import Mask, address
from deepinfer_structured.engines import llguidance
from deepinfer_structured.matcher import Matcher

_ALONE = 0.4e-3
"""Seconds that the calling thread works alone. To wake others takes 0.1 ms, as long as 30 usual masks."""


def fill_masks(matchers: Sequence[Matcher], rows: Sequence[int], out: Mask, threads: int | None = None) -> None:
    """Fill `out[rows[i]]` with the next-token mask of `matchers[i]`; other rows are untouched.

    The buffer may be pinned memory: it is written in place. The interpreter lock is released while the library works,
    so a forward pass on another thread goes on.

    Args:
        matchers: one a constrained sequence; a matcher may appear once only.
        rows: target row of each matcher.
        out: contiguous int32 `[n, ceil(vocab / 32)]`.
        threads: threads to use for what the calling one has not done in 0.4 ms; None for one a core, at most 32.

    Raises:
        ValueError: lengths differ, a row is out of range, or the buffer has the wrong layout.
        MatcherError: a library hit its limits.
    """
    if len(matchers) != len(rows):
        raise ValueError(f"{len(matchers)} matchers but {len(rows)} rows")
    if out.ndim != 2 or out.dtype != np.int32 or not out.flags.c_contiguous:
        raise ValueError(f"expected a contiguous int32 [n, words] buffer, got {out.dtype} {out.shape}")
    if not matchers:
        return
    if not 0 <= min(rows) <= max(rows) < len(out):
        raise ValueError(f"rows must be within 0..{len(out) - 1}, got {min(rows)} to {max(rows)}")
    first, width, now = address(out), out.shape[1] * 4, time.perf_counter
    until = now() + _ALONE
    left: list[tuple[Matcher, int]] = []
    for matcher, row in zip(matchers, rows, strict=True):
        native = matcher.native
        if matcher.ended or not isinstance(native, llguidance.LlguidanceMatcher):
            matcher.fill_mask(out[row])
        elif left or now() > until:
            left.append((matcher, row))
        else:
            native.native.unsafe_compute_mask_ptr(first + row * width, width)
            if native.native.is_error():
                native.check()
            whitespace = matcher.whitespace  # `matcher.narrowed` written out: calls are most of this loop's own time
            if matcher.guard is not None or (whitespace is not None and whitespace.place > whitespace.free):
                matcher.restrict(out[row])
    if left:
        _fill_together(left, out, threads or min(32, os.cpu_count() or 1))


def _fill_together(left: list[tuple[Matcher, int]], out: Mask, threads: int) -> None:
    pool = llguidance.executor(threads)
    parallel = [(matcher.native.native, row) for matcher, row in left]  # pyrefly: ignore
    pool.unsafe_compute_mask_ptr(parallel, address(out), out.shape[1] * 4, out.shape[0])
    for matcher, row in left:
        matcher.native.check()
        if matcher.narrowed:
            matcher.restrict(out[row])
