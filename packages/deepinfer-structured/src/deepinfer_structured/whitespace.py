"""The bound on whitespace between JSON tokens, counted beside the grammar.

A grammar that counts has another state, and so another mask, after each blank; one that does not keeps both along a run.
Which part of a text is whitespace between tokens needs no grammar: what is outside its strings.
"""

from __future__ import annotations

import functools
import weakref
from array import array

import numpy as np
from numpy.typing import NDArray

from deepinfer_structured.bitmask import Mask, mask_words
from deepinfer_structured.vocab import Vocabulary

INSIDE, ESCAPED = -1, -2  # places in a string; outside, the place is the number of blanks just written, 0 or more
_ON = -3  # an end in `_ends`: the token is blank, the run goes on
_QUOTE, _BACKSLASH = 0x22, 0x5C


@functools.cache
def _steps() -> NDArray[np.int8]:
    """`[3, 256]`: outside (0), inside (1) or escaped (2) after a byte read there."""
    steps = np.zeros((3, 256), np.int8)
    steps[1:] = 1
    steps[0, _QUOTE], steps[1, _QUOTE], steps[1, _BACKSLASH] = 1, 0, 2
    return steps


class WhitespaceTables:
    """What each token of a vocabulary does to a run of whitespace, from each of the three kinds of place.

    Args:
        vocabulary: whose tokens.
        bound: longest run outside strings.

    Attributes:
        free: the last place at which every token keeps the bound; so do all places below it.
    """

    def __init__(self, vocabulary: Vocabulary, bound: int) -> None:
        self.bound, self._words = bound, mask_words(vocabulary.size)
        special = set(vocabulary.special_ids)
        texts = [b"" if i in special else t for i, t in enumerate(vocabulary.tokens)]
        self._ends: list[array[int]] = []
        self._costs: list[array[int]] = []
        for start in range(3):
            ends, costs = _read(texts, start, bound)
            self._ends.append(array("h", ends.astype(np.int16).tobytes()))
            self._costs.append(array("h", costs.astype(np.int16).tobytes()))
        self._most = [max(costs, default=0) for costs in self._costs]
        self.free = bound - self._most[0] if max(self._most[1:]) <= bound else ESCAPED - 1
        self._kept: dict[int, Mask | None] = {}

    def after(self, place: int, token: int) -> int | None:
        """The place after a token; None if whitespace runs over the bound."""
        start = -place if place < 0 else 0
        run = (place if place > 0 else 0) + self._costs[start][token]
        if run > self.bound:
            return None
        end = self._ends[start][token]
        return run if end == _ON else end

    def kept(self, place: int) -> Mask | None:
        """The mask of the tokens that keep the bound at a place; None if all do."""
        if place not in self._kept:
            self._kept[place] = self._mask(place)
        return self._kept[place]

    def _mask(self, place: int) -> Mask | None:
        start, left = (-place, self.bound) if place < 0 else (0, self.bound - place)
        if left >= self._most[start]:
            return None
        bits = np.ones(32 * self._words, np.bool_)
        costs = np.frombuffer(self._costs[start], np.int16)
        bits[: len(costs)] = costs <= left
        return np.packbits(bits, bitorder="little").view(np.int32)


def _read(texts: list[bytes], start: int, bound: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Read every token from one kind of place, all of them byte by byte together.

    Returns:
        `[tokens]` the places after them, or `_ON`, and the blanks that each adds to the run before it; `bound + 1` for those
        that hold too long a run themselves.
    """
    lengths = np.array([len(t) for t in texts], np.int32)
    order = np.argsort(-lengths, kind="stable")  # those that are not over yet stay in front
    data = np.frombuffer(b"".join(texts), np.uint8)
    first = (np.cumsum(lengths) - lengths)[order]
    live = np.searchsorted(-lengths[order], -np.arange(lengths.max(initial=0)), side="left")
    place = np.full(len(texts), start, np.int8)
    fresh = np.full(len(texts), start == 0)  # nothing but blanks so far
    lead, run, longest = np.zeros((3, len(texts)), np.int32)
    blanks = np.isin(np.arange(256), list(b" \t\n\r"))
    for i, n in enumerate(live.tolist()):
        byte = data[first[:n] + i]
        blank = blanks[byte] & (place[:n] == 0)
        place[:n] = _steps()[place[:n], byte]
        fresh[:n] &= blank
        lead[:n] += fresh[:n]
        run[:n] = (run[:n] + 1) * blank
        np.maximum(longest[:n], run[:n], out=longest[:n])
    costs = np.where(longest > bound, bound + 1, np.minimum(lead, bound + 1))
    ends = np.where(place > 0, -place.astype(np.int32), np.where(fresh, _ON, np.minimum(run, bound + 1)))
    back = np.argsort(order)
    return ends[back], costs[back]


_made: weakref.WeakKeyDictionary[Vocabulary, dict[int, WhitespaceTables]] = weakref.WeakKeyDictionary()


def tables(vocabulary: Vocabulary, bound: int) -> WhitespaceTables:
    """The tables of a vocabulary and a bound, made once."""
    made = _made.setdefault(vocabulary, {})
    if bound not in made:
        made[bound] = WhitespaceTables(vocabulary, bound)
    return made[bound]


class Whitespace:
    """Follows the tokens of one sequence, a JSON text.

    Attributes:
        place: where the text is: `INSIDE` or `ESCAPED` in a string, otherwise the number of blanks just written.
        free: the last place, in this order, at which every token keeps the bound.
    """

    __slots__ = ("_before", "_tables", "free", "place")

    def __init__(self, tables: WhitespaceTables) -> None:
        self._tables = tables
        self._before: list[int] = []
        self.place, self.free = 0, tables.free

    def accept(self, token: int) -> bool:
        """Read a token; False, and nothing is read, if whitespace runs over the bound."""
        after = self._tables.after(self.place, token)
        if after is None:
            return False
        self._before.append(self.place)
        self.place = after
        return True

    def rollback(self, count: int) -> None:
        """Forget the last `count` tokens."""
        if count:
            self.place = self._before[-count]
            del self._before[-count:]

    def clone(self) -> Whitespace:
        """An independent copy."""
        other = Whitespace(self._tables)
        other._before, other.place = self._before[:], self.place
        return other

    def kept(self) -> Mask | None:
        """The mask of the tokens with which whitespace does not run over the bound; None if that is all of them."""
        return self._tables.kept(self.place)
