"""Masks of many sequences at once, on the threads of the grammar library."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from deepinfer_structured.bitmask import Mask, set_only
from deepinfer_structured.engines import llguidance
from deepinfer_structured.matcher import Matcher


def fill_masks(matchers: Sequence[Matcher], rows: Sequence[int], out: Mask, threads: int | None = None) -> None:
    """Fill `out[rows[i]]` with the next-token mask of `matchers[i]`; other rows are untouched.

    The buffer may be pinned memory: it is written in place. The interpreter lock is released while the library works,
    so a forward pass on another thread goes on.

    Args:
        matchers: one a constrained sequence; a matcher may appear once only.
        rows: target row of each matcher.
        out: contiguous int32 `[n, ceil(vocab / 32)]`.
        threads: threads to use; None for one a core, at most 32.

    Raises:
        ValueError: lengths differ or the buffer has the wrong layout.
        MatcherError: a library hit its limits.
    """
    if len(matchers) != len(rows):
        raise ValueError(f"{len(matchers)} matchers but {len(rows)} rows")
    if out.ndim != 2 or out.dtype != np.int32 or not out.flags.c_contiguous:
        raise ValueError(f"expected a contiguous int32 [n, words] buffer, got {out.dtype} {out.shape}")
    parallel: list[tuple[object, int]] = []
    filled: list[tuple[Matcher, int]] = []
    for matcher, row in zip(matchers, rows, strict=True):
        native = matcher.native
        if matcher.is_terminated:
            set_only(out[row], matcher.vocabulary.eos_ids)
        elif isinstance(native, llguidance.LlguidanceMatcher):
            parallel.append((native.native, row))
            filled.append((matcher, row))
        else:
            matcher.fill_mask(out[row])
    if parallel:
        pool = llguidance.executor(threads or min(32, os.cpu_count() or 1))
        pool.unsafe_compute_mask_ptr(parallel, out.ctypes.data, out.shape[1] * 4, out.shape[0])
    for matcher, row in filled:
        matcher.native.check()
        matcher.restrict(out[row])
