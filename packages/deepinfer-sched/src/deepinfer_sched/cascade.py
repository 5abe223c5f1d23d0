"""Which decode rows share a prefix, and how deep the sharing is worth splitting."""

from __future__ import annotations

import numpy as np

from deepinfer_sched.step import Cascade


class CascadeFinder:
    """Finds the cascades of a step, anew only when its decode rows have changed."""

    def __init__(self, page_size: int, min_rows: int, min_tokens: int) -> None:
        self._page_size = page_size
        self._min_rows = min_rows
        self._min_pages = max(1, -(-min_tokens // page_size))
        self._key: tuple[int, bytes] | None = None
        self._cascades: tuple[Cascade, ...] = ()

    def find(self, slots: np.ndarray, prompts: np.ndarray, pages: np.ndarray, changes: int) -> tuple[Cascade, ...]:
        """Cascades among decode rows.

        Args:
            slots: int32 [n], slots of the decode rows, in plan order.
            prompts: int [n], tokens of each row's prompt; sharing ends there.
            pages: int32 [max_running, max_pages], the page table.
            changes: a number that grows whenever a slot changes hands.
        """
        if not self._min_rows or len(slots) < self._min_rows:
            return ()
        key = (changes, slots.tobytes())
        if key != self._key:
            groups = find_shared_prefixes(pages[slots], prompts // self._page_size, self._min_pages)
            self._cascades = tuple(
                Cascade(rows.astype(np.int32), count, count * self._page_size)
                for rows, count in groups
                if len(rows) >= self._min_rows
            )
            self._key = key
        return self._cascades


def find_shared_prefixes(pages: np.ndarray, full_pages: np.ndarray, min_pages: int) -> list[tuple[np.ndarray, int]]:
    """Partition rows into groups with a common physical prefix so that the most page reads are saved.

    A group of k rows over p common pages saves (k - 1) * p reads. Where a group could also be split into smaller ones
    with longer prefixes, whichever saves more is taken.

    Args:
        pages: int32 [n, m], page table of each row.
        full_pages: int [n], leading pages of each row that hold computed tokens only.
        min_pages: shortest prefix worth sharing, at least 1.

    Returns:
        Disjoint groups of at least two rows: (ascending row indices, common pages).
    """
    depth = min(pages.shape[1], int(full_pages.max(initial=0)))
    if len(pages) < 2 or depth < min_pages:
        return []
    valid = np.arange(depth) < full_pages[:, None]
    table = np.where(valid, pages[:, :depth], -1 - np.arange(len(pages))[:, None])  # ends compare unequal
    return _best(table, np.arange(len(pages)), 0, max(min_pages, 1))[1]


def _best(table: np.ndarray, rows: np.ndarray, column: int, min_pages: int) -> tuple[int, list[tuple[np.ndarray, int]]]:
    """Most reads saved among `rows`, which agree on all columns before `column`, and the groups that save them."""
    saved, groups = 0, []
    for part in _split(table, rows, column):
        common = _common(table, part, column)
        own = (len(part) - 1) * common if common >= min_pages else 0
        deeper, deeper_groups = _best(table, part, common, min_pages) if common < table.shape[1] else (0, [])
        if deeper > own:
            saved, groups = saved + deeper, groups + deeper_groups
        elif own:
            saved, groups = saved + own, [*groups, (part, common)]
    return saved, groups


def _split(table: np.ndarray, rows: np.ndarray, column: int) -> list[np.ndarray]:
    """Parts of at least two rows that agree on `column`."""
    values = table[rows, column]
    order = np.argsort(values, kind="stable")
    cuts = np.flatnonzero(np.diff(values[order])) + 1
    return [part for part in np.split(rows[order], cuts) if len(part) > 1]


def _common(table: np.ndarray, rows: np.ndarray, column: int) -> int:
    """Leading columns on which all `rows` agree; they agree on `column` and everything before."""
    same = (table[rows, column:] == table[rows[0], column:]).all(axis=0)
    return column + (int(same.argmin()) if not same.all() else len(same))
