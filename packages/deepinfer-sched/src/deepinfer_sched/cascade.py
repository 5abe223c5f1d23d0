"""Which decode rows share a prefix, and how deep the sharing is worth splitting."""

from __future__ import annotations

from itertools import pairwise

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
    """Partition rows into groups with a common physical prefix so that many page reads are saved.

    A group of k rows over p common pages saves (k - 1) * p reads. Where some of its rows share more, either all rows
    stay together or those go apart and the others share what is left, whichever saves more (not always the very best
    partition, but found in one pass).

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
    inside = np.arange(depth) < full_pages[:, None]
    table = np.where(inside, pages[:, :depth], -1 - np.arange(len(pages), dtype=np.int32)[:, None])  # ends differ
    order = np.ascontiguousarray(table.astype(">i4")).view(f"V{4 * depth}").ravel().argsort(kind="stable")
    ranked = table[order]
    equal = ranked[1:] == ranked[:-1]
    common = np.where(equal.all(axis=1), depth, equal.argmin(axis=1)).tolist()  # of each row with the one before it
    groups = _best(common, 0, len(pages), max(min_pages, 1))[1]
    return [(np.sort(order[rows]), count) for rows, count in groups]


_LEVELS = 64  # prefixes nested deeper than that are not looked into
_Groups = list[tuple[list[int], int]]  # (ranked rows, common pages)


def _best(common: list[int], first: int, last: int, min_pages: int, level: int = 0) -> tuple[int, _Groups, list[int]]:
    """Group the ranked rows [first, last): page reads saved, the groups, and the rows that are in none."""
    rows = list(range(first, last))
    if len(rows) < 2:
        return 0, [], rows
    inner = common[first : last - 1]
    shared = min(inner)
    own = (len(rows) - 1) * shared if shared >= min_pages else 0
    saved, groups, rest = 0, [], rows
    if shared < max(inner) and level < _LEVELS:
        cuts = [first, *(first + place + 1 for place, value in enumerate(inner) if value == shared), last]
        parts = [_best(common, begin, end, min_pages, level + 1) for begin, end in pairwise(cuts)]
        saved = sum(part[0] for part in parts)
        groups = [group for part in parts for group in part[1]]
        rest = [row for part in parts for row in part[2]]
        if shared >= min_pages and len(rest) > 1:  # those that found no longer prefix share the short one
            saved, groups, rest = saved + (len(rest) - 1) * shared, [*groups, (rest, shared)], []
    if own > saved:
        return own, [(rows, shared)], []
    return saved, groups, rest
