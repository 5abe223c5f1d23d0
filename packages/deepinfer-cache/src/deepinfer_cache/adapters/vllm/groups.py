"""A model's kinds of KV cache, and which pages of each a hit needs. Pure functions, no tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """One kind of KV cache, which vLLM calls a group.

    Attributes:
        index: its place among vLLM's groups.
        block_size: tokens of a page.
        window: how many tokens before the next one must be there; None for all of them.
        page_bytes: bytes of a page over the layers of one rank, as vLLM plans them.
    """

    index: int
    block_size: int
    window: int | None
    page_bytes: int

    def first_page(self, hit: int) -> int:
        """The first page that a hit of `hit` tokens needs."""
        return 0 if self.window is None else max(0, hit - self.window) // self.block_size

    def pages(self, computed: int, hit: int) -> range:
        """Pages that a hit of `hit` tokens needs beyond the `computed` ones that the device has."""
        return range(max(computed // self.block_size, self.first_page(hit)), hit // self.block_size)


def longest_hit(
    groups: Sequence[GroupLayout], alignment: int, computed: int, limit: int, kept: Callable[[int, int], bool]
) -> int:
    """Return how many leading tokens every group can serve: all pages of a full group, the last window of the others.

    Args:
        groups: the kinds of cache.
        alignment: a hit ends at a multiple of it; it is a multiple of every block size.
        computed: tokens that the device has, windows included; returned when the store adds nothing.
        limit: most tokens of a hit.
        kept: whether the store has a page: (position in `groups`, page).
    """
    if computed % alignment:
        return computed
    hit = limit // alignment * alignment
    for place, group in enumerate(groups):
        if group.window is None:
            gap = next((p for p in group.pages(computed, hit) if not kept(place, p)), hit // group.block_size)
            hit = gap * group.block_size // alignment * alignment
    windows = [(place, group) for place, group in enumerate(groups) if group.window is not None]
    while hit > computed:
        gaps = (
            p * g.block_size for place, g in windows for p in reversed(g.pages(computed, hit)) if not kept(place, p)
        )
        gap = next(gaps, None)
        if gap is None:
            return hit
        hit = gap // alignment * alignment  # no hit reaches over a page that is missing, unless it ends a window later
    return computed
