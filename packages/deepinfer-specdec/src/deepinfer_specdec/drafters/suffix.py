"""Suffix drafting: one automaton over all prompts and outputs of the job, because offline outputs repeat each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from deepinfer_specdec.draft import Draft
from deepinfer_specdec.drafters.automaton import ROOT, SuffixAutomaton
from deepinfer_specdec.drafters.base import row_limits
from deepinfer_specdec.drafters.confidence import RunConfidence
from deepinfer_specdec.errors import SpecDecodeError

_SHARES = 4  # how dominant the chosen way is


class SuffixDrafter:
    """Follows the most frequent continuation of the longest context that the job has seen before.

    Memory is bounded by two generations: texts go to the old automaton, and to the young one too once the old is half full;
    a full old one is dropped and the young takes its place. About 30 bytes a state, fewer than two states a token.

    Args:
        max_draft: longest draft, tokens.
        capacity: tokens that one automaton takes before it is replaced.
        min_match: shortest context worth a guess, tokens.
    """

    name = "suffix"

    def __init__(self, max_draft: int = 8, capacity: int = 1_000_000, min_match: int = 2) -> None:
        if max_draft < 1:
            raise SpecDecodeError(f"max_draft {max_draft}; allowed: >= 1")
        if capacity < 2:
            raise SpecDecodeError(f"capacity {capacity}; allowed: >= 2 tokens")
        if min_match < 1:
            raise SpecDecodeError(f"min_match {min_match}; allowed: >= 1")
        self.max_draft = max_draft
        self._capacity = capacity
        self._min_match = min_match
        self._old = SuffixAutomaton()
        self._young: SuffixAutomaton | None = None
        self._states: dict[int, list[int]] = {}  # sequence -> [state in old, state in young]
        self.confidence = RunConfidence(_SHARES)

    @property
    def states(self) -> int:
        """Automaton states held, both generations."""
        return len(self._old) + (len(self._young) if self._young is not None else 0)

    def begin(self, sequence: int, token_ids: Sequence[int] | NDArray[np.int32]) -> None:
        """See `Drafter.begin`. Costs about 2 us a token."""
        self._states[sequence] = [ROOT, ROOT]
        self.confidence.begin(sequence)
        for token in np.asarray(token_ids).tolist():
            self._append(sequence, token)

    def extend(self, sequence: int, token_ids: Sequence[int] | NDArray[np.int32]) -> None:
        """See `Drafter.extend`. Costs 3 to 8 us a token, more the more text is held."""
        confidence, states = self.confidence, self._states[sequence]
        for said in token_ids:
            token = int(said)
            guess, _, share = self._next(states[0])
            if guess < 0:
                confidence.miss(sequence)
            else:
                confidence.score(sequence, share, guess == token)
            self._append(sequence, token)

    def propose(self, sequences: Sequence[int], limits: NDArray[np.int32] | None = None, floor: float = 0.0) -> Draft:
        """See `Drafter.propose`."""
        rows: list[list[int]] = []
        sure: list[list[float]] = []
        for sequence, limit in zip(sequences, row_limits(limits, len(sequences), self.max_draft), strict=True):
            guess, confidences = self._guess(sequence, limit, floor)
            rows.append(guess)
            sure.append(confidences)
        return Draft.from_rows(rows, sure, self.max_draft)

    def end(self, sequence: int) -> None:
        """See `Drafter.end`. The sequence's text stays in the automaton."""
        self._states.pop(sequence, None)
        self.confidence.end(sequence)

    def _guess(self, sequence: int, limit: int, floor: float) -> tuple[list[int], list[float]]:
        """Up to `limit` tokens and their confidences; the first whose survival is below `floor` is the last."""
        confidence = self.confidence
        state, survival = self._states[sequence][0], 1.0
        guess: list[int] = []
        confidences: list[float] = []
        while len(guess) < limit and survival >= floor:
            token, state, share = self._next(state)
            if token < 0:
                break
            confidences.append(confidence.confidence(sequence, len(guess), share))
            survival *= confidences[-1]
            guess.append(token)
        return guess, confidences

    def _next(self, state: int) -> tuple[int, int, int]:
        """(token, state after it, how dominant it is) of the likeliest way on; token -1 when no context worth a guess has one."""
        automaton = self._old
        # Shorter contexts have thousands of ways on: none is looked at.
        while automaton.length(state) >= self._min_match:
            token, target, count, total = automaton.likeliest(state)
            if token >= 0:
                return token, target, _share(count, total)
            state = automaton.link(state)  # this context was only ever seen at a text's end
        return -1, state, 0

    def _append(self, sequence: int, token: int) -> None:
        states = self._states[sequence]
        states[0] = self._old.append(states[0], token)
        if self._young is not None:
            states[1] = self._young.append(states[1], token)
        if self._old.tokens >= self._capacity:
            self._turn_over()
        elif self._young is None and self._old.tokens >= self._capacity // 2:
            self._young = SuffixAutomaton()

    def _turn_over(self) -> None:
        self._old = self._young if self._young is not None else SuffixAutomaton()
        self._young = None
        for states in self._states.values():
            states[0], states[1] = states[1], ROOT


def _share(count: int, total: int) -> int:
    """0: contested, 1: mostly this one, 2: only this one but rarely seen, 3: only this one, seen often."""
    if count == total:
        return 3 if count >= 3 else 2
    return 1 if 2 * count > total else 0
