"""Acceptance estimates for drafters without a confidence head, learned from what the sequences really said.

A guess is settled by the tokens that the engine emits next, whether the guess was verified or not. So a drafter that
costs no device time keeps learning while speculation is switched off, and comes back when it would pay.
"""

from __future__ import annotations

import numpy as np

MATCH_BUCKETS = 8


def match_bucket(length: int) -> int:
    """Bucket 0..7 of a match length: 1, 2, 3, 4-5, 6-8, 9-16, 17-32, more."""
    if length <= 3:
        return max(0, length - 1)
    for bucket, top in ((3, 5), (4, 8), (5, 16), (6, 32)):
        if length <= top:
            return bucket
    return 7


class MatchConfidence:
    """Beta posteriors of "column j is right, given that the columns before it were", with two views of the evidence.

    The pooled view counts by (column, feature bucket) over the whole job and forgets slowly. The sequence view compares
    how many of a sequence's recent guesses were right with how many the pooled view expected, and shifts the odds
    accordingly: requests of one job differ far more than their match lengths tell.

    Args:
        max_draft: columns.
        buckets: values of the feature.
        memory: pooled evidence beyond this many trials per cell fades.
        sequence_memory: the same for one sequence, in guesses.
    """

    def __init__(
        self, max_draft: int, buckets: int = MATCH_BUCKETS, memory: float = 400.0, sequence_memory: float = 24.0
    ) -> None:
        self._max_draft = max_draft
        self._memory = memory
        self._keep = 1.0 - 1.0 / sequence_memory
        # Prior: one right and one wrong guess in two, rising with the bucket; weighs two trials, so data takes over
        # quickly.
        prior = np.linspace(0.35, 0.85, buckets)
        self._right = np.tile(2.0 * prior, (max_draft, 1))
        self._trials = np.full((max_draft, buckets), 2.0)
        self._table = (self._right / self._trials).tolist()
        self._pending: dict[int, tuple[list[int], list[int], int]] = {}
        self._record: dict[int, list[float]] = {}  # sequence -> [right, expected right, trials], fading

    def begin(self, sequence: int) -> None:
        """Start a sequence's record."""
        self._record[sequence] = [0.0, 0.0, 0.0]
        self._pending.pop(sequence, None)

    def end(self, sequence: int) -> None:
        """Forget a sequence. Unknown names are ignored."""
        self._record.pop(sequence, None)
        self._pending.pop(sequence, None)

    def odds(self, sequence: int) -> float:
        """How much likelier to be right (as odds) this sequence's guesses are than the pooled view says."""
        right, expected, trials = self._record[sequence]
        return ((right + 1.0) / (trials - right + 1.0)) / ((expected + 1.0) / (trials - expected + 1.0))

    def confidence(self, column: int, bucket: int, odds: float) -> float:
        """Probability that a guess in `column` with feature `bucket` is right, for a sequence of these `odds`."""
        pooled = self._table[column][bucket]
        return pooled * odds / (1.0 - pooled + pooled * odds)

    def remember(self, sequence: int, guess: list[int], features: list[int]) -> None:
        """Keep a guess and the feature buckets of its tokens until `settle`; it replaces the one before."""
        if guess:
            self._pending[sequence] = (guess, features, 0)
        else:
            self._pending.pop(sequence, None)

    def settle(self, sequence: int, emitted: list[int]) -> None:
        """Score the last guess against the tokens that followed, up to the first wrong one. What `emitted` does not reach
        waits for the next call, so that deep columns are learned from plain decoding too.
        """
        pending = self._pending.pop(sequence, None)
        if pending is None:
            return
        guess, features, first = pending
        record = self._record[sequence]
        for column, said in enumerate(emitted, first):
            if column == len(guess):
                return
            right = guess[column] == said
            record[0] = record[0] * self._keep + right
            record[1] = record[1] * self._keep + self._table[column][features[column]]
            record[2] = record[2] * self._keep + 1.0
            self._count(column, features[column], right)
            if not right:
                return
        self._pending[sequence] = (guess, features, first + len(emitted))

    def waits(self, sequence: int) -> bool:
        """Whether a guess of the sequence is still being scored."""
        return sequence in self._pending

    def _count(self, column: int, bucket: int, right: bool) -> None:
        trials = self._trials[column, bucket]
        if trials > self._memory:
            self._right[column, bucket] *= self._memory / trials
            self._trials[column, bucket] = self._memory
        self._right[column, bucket] += right
        self._trials[column, bucket] += 1.0
        self._table[column][bucket] = float(self._right[column, bucket] / self._trials[column, bucket])
