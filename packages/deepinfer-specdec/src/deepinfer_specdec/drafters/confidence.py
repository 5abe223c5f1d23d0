"""How likely a guess is right, for drafters without a confidence head: learned from every token that the sequences say.

A guess for a place further on is made as if all guesses before it were right. If they are, the place is like any other that a
sequence has come to after a longer run of right guesses; so all places share one table, and what is assumed counts as if
it had been seen. The run matters more than anything else that is known: a sequence that copies goes on copying, one that met a
familiar phrase soon leaves it. How often a sequence was guessed right lately says which of the two it is.

What would have been guessed is scored against each token that a sequence is told to have said, whether or not anyone asked for
a draft. So the table knows as much while speculation is off as while it is on.
"""

from __future__ import annotations

import numpy as np

MATCH_BUCKETS = 8
_RUNS = (0, 1, 2, 4, 8, 16)  # upper ends of the ranges of runs that are counted apart; longer ones are the last
_OF_RUN = [sum(run > top for top in _RUNS) for run in range(_RUNS[-1] + 2)]
_RATES = 3  # ranges of the share of a sequence's latest guesses that were right
_KEEP = 1.0 - 1.0 / 16.0  # of that share, per token
_PRIOR = np.linspace(0.3, 0.9, len(_RUNS) + 1)  # by range of runs, before anything was seen; weighs two guesses
_PRIOR_WEIGHT = 2.0


def match_bucket(length: int) -> int:
    """Bucket 0..7 of a match length: 1, 2, 3, 4-5, 6-8, 9-16, 17-32, more."""
    if length <= 3:
        return max(0, length - 1)
    for bucket, top in ((3, 5), (4, 8), (5, 16), (6, 32)):
        if length <= top:
            return bucket
    return 7


class RunConfidence:
    """Shares of right guesses, by the run of right ones before them, the share of right ones lately, and a feature of the guess.

    Args:
        features: values of the feature.
        memory: evidence beyond this many guesses of a kind fades.
    """

    def __init__(self, features: int, memory: float = 400.0) -> None:
        self._features = features
        self._memory = memory
        self._right = np.repeat(_PRIOR_WEIGHT * _PRIOR, _RATES * features).tolist()
        self._guesses = np.full(_PRIOR.size * _RATES * features, _PRIOR_WEIGHT).tolist()
        self._standing: dict[int, tuple[int, float]] = {}  # sequence -> run, share of right guesses lately

    def begin(self, sequence: int) -> None:
        """Start a sequence: nothing was right so far."""
        self._standing[sequence] = 0, 0.0

    def end(self, sequence: int) -> None:
        """Forget a sequence. Unknown names are ignored."""
        self._standing.pop(sequence, None)

    def confidence(self, sequence: int, ahead: int, feature: int) -> float:
        """Probability that a guess is right which follows `ahead` others that are taken to be right."""
        run, rate = self._standing[sequence]
        kind = self._kind(run + ahead, 1.0 - (1.0 - rate) * _KEEP**ahead, feature)
        return self._right[kind] / self._guesses[kind]

    def miss(self, sequence: int) -> None:
        """The sequence said a token that nothing was guessed for."""
        self._standing[sequence] = 0, self._standing[sequence][1] * _KEEP

    def score(self, sequence: int, feature: int, right: bool) -> None:
        """The sequence said a token; a guess with this feature was `right`, or would have been."""
        run, rate = self._standing[sequence]
        kind = self._kind(run, rate, feature)
        if self._guesses[kind] > self._memory:
            self._right[kind] *= self._memory / self._guesses[kind]
            self._guesses[kind] = self._memory
        self._right[kind] += right
        self._guesses[kind] += 1.0
        self._standing[sequence] = (run + 1, 1.0 - (1.0 - rate) * _KEEP) if right else (0, rate * _KEEP)

    def _kind(self, run: int, rate: float, feature: int) -> int:
        place = _OF_RUN[min(run, _RUNS[-1] + 1)]
        return (place * _RATES + min(int(rate * _RATES), _RATES - 1)) * self._features + feature
