"""What a lookup found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hit:
    """A prefix that is in the cache, and where computing starts because of it.

    Attributes:
        length: tokens of the prefix whose shared entries are there; a multiple of the page size.
        pages: the pages that hold them, in order.
        start: first position that must be computed (`length`, or less when a window has to be replayed).
        replay_start: the window floor of every prefill row (V4.1 notes 4.2, rule 4); 0 means no floor.
        write_floor: entries of prefix groups that end below this position are not written again (rule 5).
    """

    length: int = 0
    pages: tuple[int, ...] = ()
    start: int = 0
    replay_start: int = 0
    write_floor: int = 0


MISS = Hit()
