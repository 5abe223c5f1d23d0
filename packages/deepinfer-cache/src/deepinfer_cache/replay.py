"""Bounded replay of sliding windows: which rows see, write and keep what (V4.1 notes, section 4.2).

Pure functions over arrays, for models, runners and tests. R rows (sequences) of one step throughout.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deepinfer_cache.strategy import Resume


def resume_with_window(length: int, num_tokens: int) -> Resume:
    """A hit whose windows arrive with it, e.g. from another engine that prefilled the same request (rule 9).

    Nothing is replayed; of a prompt that is there completely only the last token is computed, for its logits.
    """
    start = min(length, num_tokens - 1)
    return Resume(length, start, 0, length, start)


def window_mask(queries: np.ndarray, keys: np.ndarray, window: int, floor: int) -> np.ndarray:
    """Which keys a query sees: not later than itself, inside its window, and not below the floor.

    Args:
        queries: int [q], positions.
        keys: int [k], positions.
        window: W.
        floor: replay start for prefill rows, 0 for decode rows (rule 4).

    Returns:
        bool [q, k].
    """
    query, key = queries[:, None], keys[None, :]
    return (key <= query) & (key > query - window) & (key >= floor)


def window_floors(floors: np.ndarray, prefills: np.ndarray) -> np.ndarray:
    """Floor of each row: its replay start while it prefills, none afterwards (rules 4 and 12). int [R]."""
    return np.where(prefills, floors, 0)


def written_entries(start: int, end: int, ratio: int, write_floor: int) -> np.ndarray:
    """Entries of a prefix group that rows [start, end) of one sequence write (rule 5).

    Entry j stands for tokens j*ratio .. (j+1)*ratio - 1. It is written by the row that completes it, unless it ends
    below the write floor, where a shared copy is already.

    Returns:
        int64, ascending.
    """
    entries = np.arange(start // ratio, -(-end // ratio), dtype=np.int64)
    last = (entries + 1) * ratio - 1
    return entries[(last >= start) & (last < end) & (last >= write_floor)]


@dataclass(frozen=True, slots=True)
class Trim:
    """Rows that go on into the decoder layers (rule 10).

    Attributes:
        kept: int64 [R], how many of each sequence's rows are kept: always its last ones.
        floors: int64 [R], window floor of the kept rows.
        rows: int64 [sum(kept)], indices into the flattened rows of the step.
    """

    kept: np.ndarray
    floors: np.ndarray
    rows: np.ndarray


def trim_rows(
    counts: np.ndarray, ends: np.ndarray, floors: np.ndarray, prefills: np.ndarray, keep_all: np.ndarray, window: int
) -> Trim:
    """Keep the last W rows of each prefill chunk (rules 10 to 12).

    Args:
        counts: int [R], rows of each sequence in this step.
        ends: int [R], tokens of the sequence after this step.
        floors: int [R], replay starts.
        prefills: bool [R]; decode and verification rows are never trimmed.
        keep_all: bool [R], every row's output is wanted (prompt logprobs, hidden states).
        window: W. A chunk of at most W rows is not trimmed and keeps its floor.
    """
    trimmed = prefills & ~keep_all & (counts > window)
    kept = np.where(trimmed, window, counts).astype(np.int64)
    base = window_floors(floors, prefills)
    new_floors = np.where(trimmed, np.maximum(base, ends - window), base).astype(np.int64)
    first = np.cumsum(counts) - kept
    offset = np.arange(int(kept.sum())) - np.repeat(np.cumsum(kept) - kept, kept)
    return Trim(kept, new_floors, np.repeat(first, kept) + offset)
