"""What a lookup found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer_cache.strategy import Resume


@dataclass(frozen=True, slots=True)
class Hit:
    """A prefix that is in the cache, and where computing starts because of it.

    Attributes:
        length: tokens of the prefix whose shared entries are there. A multiple of the page size, but for `partial`.
        pages: device pages that hold its first tokens, in order.
        start: first position that must be computed (`length`, or less when a window has to be replayed).
        replay_start: the window floor of every prefill row (V4.1 notes 4.2, rule 4); 0 means no floor.
        write_floor: entries of prefix groups that end below this position are not written again (rule 5).
        window_start: first position that needs a place in the window groups.
        stored: keys of the pages after `pages` that come from a lower tier (host memory, disk).
        partial: (page, tokens): the page after those starts with `tokens` tokens of this one, which are copied.
        checkpoint: key under which the window before `start` is kept, or None.
    """

    length: int = 0
    pages: tuple[int, ...] = ()
    start: int = 0
    replay_start: int = 0
    write_floor: int = 0
    window_start: int = 0
    stored: tuple[bytes, ...] = ()
    partial: tuple[int, int] | None = None
    checkpoint: bytes | None = None

    @classmethod
    def of(
        cls,
        resume: Resume,
        pages: Sequence[int],
        stored: Sequence[bytes],
        partial: tuple[int, int] | None,
        checkpoint: bytes | None,
    ) -> Hit:
        """What was found, and how to go on from there."""
        return cls(
            resume.length,
            tuple(pages),
            resume.start,
            resume.replay_start,
            resume.write_floor,
            resume.window_start,
            tuple(stored),
            partial,
            checkpoint,
        )


MISS = Hit()
