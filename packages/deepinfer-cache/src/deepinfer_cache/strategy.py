"""What a hit is worth when a model also has windows: where computing starts, and what it may write.

V4.1 notes, section 5 (`full`, `periodic`, `exact`) and section 4 (`bounded`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from deepinfer_cache.errors import CacheConfigError


@dataclass(frozen=True, slots=True)
class Resume:
    """How a sequence goes on after a hit.

    Attributes:
        length: tokens of the hit that are kept; 0 drops it.
        start: first position to compute. Rows below `length` are replayed: they fill windows and write nothing shared.
        replay_start: window floor of every prefill row of the sequence (rule 4); 0 means none.
        write_floor: entries of prefix groups that end below it are there already and are not written (rule 5).
        window_start: first position that needs a place in the window groups.
    """

    length: int
    start: int
    replay_start: int
    write_floor: int
    window_start: int


FRESH = Resume(0, 0, 0, 0, 0)


class WindowStrategy(Protocol):
    """Decides what a hit means for window groups. Pure: a function of its arguments."""

    @property
    def name(self) -> str:
        """As in `CacheConfig.strategy`."""
        ...

    @property
    def period(self) -> int:
        """Positions between kept windows; 0 keeps none."""
        ...

    def resume(self, length: int, num_tokens: int, checkpoint: int = 0) -> Resume:
        """Where a sequence of `num_tokens` tokens goes on after a hit of `length`.

        Args:
            length: tokens found in all prefix groups.
            num_tokens: tokens of the sequence, N.
            checkpoint: the last position at or below `length` whose window is kept (only for `periodic`).
        """
        ...

    def max_hit(self, num_tokens: int) -> int:
        """Longest useful hit: N where replay computes the last row anyway (rule 6), else N - 1."""
        ...


@dataclass(frozen=True, slots=True)
class NoWindow:
    """A model without window groups: go on right after the hit."""

    name: str = "none"
    period: int = 0

    def resume(self, length: int, num_tokens: int, checkpoint: int = 0) -> Resume:
        return Resume(length, length, 0, length, length)

    def max_hit(self, num_tokens: int) -> int:
        return num_tokens - 1


@dataclass(frozen=True, slots=True)
class Full:
    """Windows of all positions are kept: nothing is replayed, and most of what is stored is never read."""

    window: int
    name: str = "full"
    period: int = 0

    def resume(self, length: int, num_tokens: int, checkpoint: int = 0) -> Resume:
        return Resume(length, length, 0, length, max(0, length - self.window + 1))

    def max_hit(self, num_tokens: int) -> int:
        return num_tokens - 1


@dataclass(frozen=True, slots=True)
class Periodic:
    """The window is kept every `period` tokens: go on from the last one kept, exactly."""

    window: int
    period: int
    name: str = "periodic"

    def resume(self, length: int, num_tokens: int, checkpoint: int = 0) -> Resume:
        if not checkpoint:
            return FRESH
        return Resume(length, checkpoint, 0, length, max(0, checkpoint - self.window + 1))

    def max_hit(self, num_tokens: int) -> int:
        return num_tokens - 1


@dataclass(frozen=True, slots=True)
class Exact:
    """Nothing is kept: replay L * (W - 1) tokens, after which every window is what it would have been."""

    window: int
    num_layers: int
    name: str = "exact"
    period: int = 0

    def resume(self, length: int, num_tokens: int, checkpoint: int = 0) -> Resume:
        start = length - self.num_layers * (self.window - 1)
        return Resume(length, start, start, length, start) if start > 0 else FRESH

    def max_hit(self, num_tokens: int) -> int:
        return num_tokens if self.window > 1 else num_tokens - 1


@dataclass(frozen=True, slots=True)
class Bounded:
    """Nothing is kept: replay the last W tokens of the hit and treat older windows as absent (V4.1's own way).

    Rules 1 and 2 of section 4.2: a hit of at most W tokens is dropped, since replaying it is computing it.
    """

    window: int
    name: str = "bounded"
    period: int = 0

    def resume(self, length: int, num_tokens: int, checkpoint: int = 0) -> Resume:
        if length <= self.window:
            return FRESH
        start = length - self.window
        return Resume(length, start, start, length, start)

    def max_hit(self, num_tokens: int) -> int:
        return num_tokens


STRATEGIES = ("full", "periodic(p)", "exact", "bounded")


def make_strategy(name: str, window: int, num_layers: int, alignment: int) -> WindowStrategy:
    """The strategy with this name.

    Args:
        name: one of `STRATEGIES`; `periodic(2048)` keeps a window every 2,048 tokens.
        window: W, tokens; 0 for a model without windows, whose strategy is then `none`.
        num_layers: L, layers with a window.
        alignment: tokens that a period must be a multiple of.

    Raises:
        CacheConfigError: an unknown name, or a period that is no multiple of `alignment`.
    """
    periodic = re.fullmatch(r"periodic\((\d+)\)", name)
    if periodic is None and name not in STRATEGIES:
        raise CacheConfigError(f"strategy {name!r} is not one of {', '.join(STRATEGIES)}")
    if not window:
        return NoWindow()
    if periodic is not None:
        period = int(periodic[1])
        if period < 1 or period % alignment:
            raise CacheConfigError(f"strategy {name!r}: the period must be a multiple of {alignment}")
        return Periodic(window, period)
    return {"full": Full(window), "exact": Exact(window, num_layers), "bounded": Bounded(window)}[name]
