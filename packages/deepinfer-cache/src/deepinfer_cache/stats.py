"""Numbers an operator understands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CacheStats:
    """Counters since the start; pages are those of the prefix groups.

    Attributes:
        queries: lookups that led to an admission.
        query_tokens: tokens of the prompts behind those lookups.
        hit_tokens: how many of them were found.
        evictions: cached pages that were given to someone else.
        pages: usable pages.
        used_pages: pages that a sequence holds now, or that wait behind a fence.
        cached_pages: unused pages that still hold a prefix.
        peak_used_pages: the most `used_pages` has been.
        saved_pages: pages copied to a lower tier.
        loaded_pages: pages taken from a lower tier.
        copied_pages: pages copied because only their first tokens were shared.
    """

    queries: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    evictions: int = 0
    pages: int = 0
    used_pages: int = 0
    cached_pages: int = 0
    peak_used_pages: int = 0
    saved_pages: int = 0
    loaded_pages: int = 0
    copied_pages: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the looked-up tokens that was found; 0.0 before the first lookup."""
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0
