"""Which decode rows share a prefix, and how deep the sharing is worth splitting."""

from __future__ import annotations

from dataclasses import dataclass
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
    inside = np.arange(depth) < full_pages[:, None]
    table = np.where(inside, pages[:, :depth], -1 - np.arange(len(pages), dtype=np.int32)[:, None])  # ends differ
    order = np.ascontiguousarray(table.astype(">i4")).view(f"V{4 * depth}").ravel().argsort(kind="stable")
    ranked = table[order]
    equal = ranked[1:] == ranked[:-1]
    common = np.where(equal.all(axis=1), depth, equal.argmin(axis=1)).tolist()  # of each row with the one before it
    groups = _best(common, 0, len(pages), 0, max(min_pages, 1)).groups
    return [(np.sort(order[rows]), count) for rows, count in groups]


@dataclass(frozen=True, slots=True)
class _Choice:
    """What is best for a run of ranked rows.

    Attributes:
        saved: page reads saved, with `price` for each row that joins a group further up.
        groups: (ranked rows, common pages).
        rest: ranked rows that join a group further up, or none.
    """

    saved: int
    groups: list[tuple[list[int], int]]
    rest: list[int]


def _best(common: list[int], first: int, last: int, price: int, min_pages: int) -> _Choice:
    """Group the ranked rows [first, last), given what a row is worth to a group with a shorter prefix."""
    if last - first < 2:
        return _Choice(price * (last - first), [], list(range(first, last)))
    inner = common[first : last - 1]
    shared = min(inner)
    cuts = [first, *(first + place + 1 for place, value in enumerate(inner) if value == shared), last]
    choices = []
    if shared >= min_pages:  # a group of its own: its first row saves nothing
        parts = [_best(common, begin, end, shared, min_pages) for begin, end in pairwise(cuts)]
        rows = [row for part in parts for row in part.rest]
        groups = [group for part in parts for group in part.groups]
        if len(rows) > 1:
            choices.append(_Choice(sum(part.saved for part in parts) - shared, [*groups, (rows, shared)], []))
    if shared > price or not choices:
        parts = (
            [_best(common, begin, end, price, min_pages) for begin, end in pairwise(cuts)]
            if shared != max(inner)
            else []
        )
        if parts:
            choices.append(
                _Choice(
                    sum(part.saved for part in parts),
                    [group for part in parts for group in part.groups],
                    [row for part in parts for row in part.rest],
                )
            )
        else:
            choices.append(_Choice(price * (last - first), [], list(range(first, last))))
    return max(choices, key=lambda choice: choice.saved)
