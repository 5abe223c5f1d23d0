"""Stop strings: where a text ends, and which tokens that text needs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stop:
    """A stop string that was found.

    Attributes:
        string: the stop string.
        start, end: its place in the text, characters.
    """

    string: str
    start: int
    end: int


class StopMatcher:
    """Looks for stop strings in a text that grows.

    Of several, the one that is complete first wins; of those complete at the same character, the longest. So what is
    found does not depend on how the text was cut into tokens.

    Args:
        strings: non-empty stop strings, at least one.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(sorted(set(strings), key=len, reverse=True))

    def find(self, text: str, seen: int) -> Stop | None:
        """The first stop string that ends after `seen` characters.

        Args:
            text: the whole text so far.
            seen: characters that were searched before, or that may hold complete stop strings (`min_tokens`).
        """
        best: Stop | None = None
        for string in self._strings:
            start = text.find(string, max(0, seen - len(string) + 1))
            if start >= 0 and (best is None or start + len(string) < best.end):
                best = Stop(string, start, start + len(string))
        return best


def tokens_needed(ends: Sequence[int], length: int) -> int:
    """How many leading tokens a text of `length` characters needs.

    Args:
        ends: characters of text after each token, ascending.
        length: characters that are kept.

    Returns:
        The smallest count whose text covers the kept text; 0 for an empty text. A character whose bytes are split
        over tokens needs all of them. Tokens without text (skipped special tokens) after the last needed one go.
    """
    return bisect_left(ends, length) + 1 if length else 0
