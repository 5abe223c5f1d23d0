"""Prompt lookup: guess that what followed the last occurrence of the current n-gram follows again. No training, no
model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from deepinfer_specdec.draft import Draft
from deepinfer_specdec.drafters.base import row_limits
from deepinfer_specdec.drafters.confidence import MATCH_BUCKETS, RunConfidence, match_bucket
from deepinfer_specdec.errors import SpecDecodeError

_MULTIPLIER = 0x9E3779B97F4A7C15
_MODULUS = 1 << 64
_MAX_MATCH = 64  # tokens; longer matches say nothing more about acceptance


class _History:
    """Tokens of one sequence and, for every n, where each n-gram ended last."""

    def __init__(self, orders: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self.index: dict[int, dict[int, int]] = {n: {} for n in orders}

    def append_all(self, added: list[int]) -> None:
        """Index `added`. An n-gram is entered only once a later token exists: one that ends at the tail has no
        continuation.
        """
        start = len(self.tokens)
        self.tokens.extend(added)
        if len(added) > 32:
            self._index_bulk(start)
        else:
            self._index_each(start)

    def _index_each(self, start: int) -> None:
        tokens = self.tokens
        for n, index in self.index.items():
            for end in range(max(start, n), len(tokens)):  # the n-gram [end - n, end) is followed by tokens[end]
                index[_key(tokens, end, n)] = end

    def _index_bulk(self, start: int) -> None:
        array = np.asarray(self.tokens, dtype=np.uint64)
        for n, index in self.index.items():
            first = max(start, n)
            if first >= len(array):
                continue
            keys = np.zeros(len(array) - first, dtype=np.uint64)
            for offset in range(n):
                keys = (
                    keys * np.uint64(_MULTIPLIER) + array[first - n + offset : len(array) - n + offset] + np.uint64(1)
                )
            index.update(zip(keys.tolist(), range(first, len(array)), strict=True))

    def lookup(self) -> tuple[int, int]:
        """(position after the last earlier occurrence of the longest known suffix, length of the match), or (0, 0)."""
        tokens = self.tokens
        total = len(tokens)
        for n, index in self.index.items():
            if total <= n:
                continue
            end = index.get(_key(tokens, total, n), 0)
            if end and tokens[end - n : end] == tokens[total - n :]:  # equal keys of unequal n-grams are possible
                length = n
                while length < min(_MAX_MATCH, end) and tokens[end - length - 1] == tokens[total - length - 1]:
                    length += 1
                return end, length
        return 0, 0

    def copy_from(self, end: int, count: int) -> list[int]:
        """`count` tokens from position `end`, going round the period when the copy reaches the tail (as LZ77 does)."""
        piece = self.tokens[end : end + count]
        period = len(self.tokens) - end
        while len(piece) < count:
            piece.append(piece[len(piece) - period])
        return piece


def _key(tokens: list[int], end: int, n: int) -> int:
    key = 0
    for token in tokens[end - n : end]:
        key = (key * _MULTIPLIER + token + 1) % _MODULUS
    return key


class NgramDrafter:
    """Looks the last n tokens of a sequence up in the sequence itself, longest n first.

    Its confidences come from `RunConfidence`: how often guesses with a match as long were right, learned from every token
    that it is told by `extend`.

    Args:
        max_draft: longest draft, tokens.
        orders: n-gram lengths to index.
    """

    name = "ngram"

    def __init__(self, max_draft: int = 8, orders: Sequence[int] = (4, 3, 2)) -> None:
        if max_draft < 1:
            raise SpecDecodeError(f"max_draft {max_draft}; allowed: >= 1")
        if not orders or min(orders) < 1:
            raise SpecDecodeError(f"orders {tuple(orders)}; allowed: at least one length >= 1")
        self.max_draft = max_draft
        self._orders = tuple(sorted(set(orders), reverse=True))
        self._histories: dict[int, _History] = {}
        self.confidence = RunConfidence(MATCH_BUCKETS)

    def begin(self, sequence: int, token_ids: Sequence[int] | NDArray[np.int32]) -> None:
        """See `Drafter.begin`. Costs about 0.1 us a token and order."""
        history = _History(self._orders)
        history.append_all(np.asarray(token_ids).tolist())
        self._histories[sequence] = history
        self.confidence.begin(sequence)

    def extend(self, sequence: int, token_ids: Sequence[int] | NDArray[np.int32]) -> None:
        """See `Drafter.extend`."""
        history, confidence = self._histories[sequence], self.confidence
        for said in token_ids:
            token = int(said)
            end, length = history.lookup()
            if length:
                confidence.score(sequence, match_bucket(length), history.tokens[end] == token)
            else:
                confidence.miss(sequence)
            history.append_all([token])

    def propose(self, sequences: Sequence[int], limits: NDArray[np.int32] | None = None, floor: float = 0.0) -> Draft:
        """See `Drafter.propose`."""
        rows: list[list[int]] = []
        sure: list[list[float]] = []
        for sequence, limit in zip(sequences, row_limits(limits, len(sequences), self.max_draft), strict=True):
            history = self._histories[sequence]
            end, length = history.lookup()
            confidences = self._confidences(sequence, length, limit if length else 0, floor)
            rows.append(history.copy_from(end, len(confidences)) if confidences else [])
            sure.append(confidences)
        return Draft.from_rows(rows, sure, self.max_draft)

    def _confidences(self, sequence: int, length: int, limit: int, floor: float) -> list[float]:
        """Of up to `limit` guesses from a match of this length; the first whose survival is below `floor` is the last."""
        survival = 1.0
        found: list[float] = []
        while len(found) < limit and survival >= floor:
            found.append(self.confidence.confidence(sequence, len(found), match_bucket(length + len(found))))
            survival *= found[-1]
        return found

    def end(self, sequence: int) -> None:
        """See `Drafter.end`."""
        self._histories.pop(sequence, None)
        self.confidence.end(sequence)
