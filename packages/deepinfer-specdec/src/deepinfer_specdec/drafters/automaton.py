"""A suffix automaton over many token sequences that grow at the same time, with PPM-style counts on its transitions.

Each sequence holds the state of its whole text. Appending a token costs amortised O(1). Most states have one way out,
which is kept in flat arrays; only branching states own a dict.

Counts follow update exclusion (as in prediction by partial matching): when token t follows, only the longest context
    that had
already seen t gets its count raised, and longer contexts get t as new. Counts of a context then say how often it had to
decide.
"""

from __future__ import annotations

from array import array

ROOT = 0
_NONE = -1


class SuffixAutomaton:
    """Suffix automaton of every text appended so far. States are integers; `ROOT` is the empty context."""

    def __init__(self) -> None:
        self._length = array("i", [0])
        self._link = array("i", [_NONE])
        self._token = array("i", [_NONE])  # the single way out; _NONE when there is none or the state branches
        self._target = array("i", [_NONE])
        self._count = array("i", [0])
        self._branches: dict[int, dict[int, list[int]]] = {}  # state -> token -> [target, count]
        self.tokens = 0

    def __len__(self) -> int:
        """States."""
        return len(self._length)

    def length(self, state: int) -> int:
        """Tokens of the longest context that the state stands for."""
        return self._length[state]

    def link(self, state: int) -> int:
        """State of the longest context that is a proper suffix and occurs elsewhere too; -1 for the root."""
        return self._link[state]

    def step(self, state: int, token: int) -> int:
        """State after `token`, or -1 when `token` never followed that context."""
        if self._token[state] == token:
            return self._target[state]
        ways = self._branches.get(state)
        return ways[token][0] if ways is not None and token in ways else _NONE

    def likeliest(self, state: int) -> tuple[int, int, int, int]:
        """(token, next state, its count, count of all) of the most frequent way out; token -1 when there is none.

        Ties go to the way that was added last.
        """
        if self._token[state] != _NONE:
            return self._token[state], self._target[state], self._count[state], self._count[state]
        ways = self._branches.get(state)
        if ways is None:
            return _NONE, _NONE, 0, 0
        token, total, best, target = _NONE, 0, 0, _NONE
        for candidate, (to, count) in ways.items():
            total += count
            if count >= best:
                token, best, target = candidate, count, to
        return token, target, best, total

    def append(self, last: int, token: int) -> int:
        """Append `token` to the text whose state is `last`; returns the text's new state."""
        self.tokens += 1
        known = self.step(last, token)
        if known != _NONE:
            self._raise_count(last, token)
            return known if self._length[known] == self._length[last] + 1 else self._split(last, known, token)
        state = self._new(self._length[last] + 1)
        at = last
        while at != _NONE and self.step(at, token) == _NONE:
            self._add(at, token, state, 1)
            at = self._link[at]
        if at == _NONE:
            self._link[state] = ROOT
            return state
        self._raise_count(at, token)
        known = self.step(at, token)
        self._link[state] = known if self._length[known] == self._length[at] + 1 else self._split(at, known, token)
        return state

    def _split(self, at: int, known: int, token: int) -> int:
        """Give the contexts of `known` no longer than `at` + token a state of their own; returns it."""
        clone = self._new(self._length[at] + 1)
        self._link[clone] = self._link[known]
        self._token[clone], self._target[clone], self._count[clone] = (
            self._token[known],
            self._target[known],
            self._count[known],
        )
        if known in self._branches:
            self._branches[clone] = {key: list(way) for key, way in self._branches[known].items()}
        self._link[known] = clone
        while at != _NONE and self.step(at, token) == known:
            self._redirect(at, token, clone)
            at = self._link[at]
        return clone

    def _new(self, length: int) -> int:
        self._length.append(length)
        self._link.append(_NONE)
        self._token.append(_NONE)
        self._target.append(_NONE)
        self._count.append(0)
        return len(self._length) - 1

    def _add(self, state: int, token: int, target: int, count: int) -> None:
        ways = self._branches.get(state)
        if ways is not None:
            ways[token] = [target, count]
        elif self._token[state] == _NONE:
            self._token[state], self._target[state], self._count[state] = token, target, count
        else:
            self._branches[state] = {
                self._token[state]: [self._target[state], self._count[state]],
                token: [target, count],
            }
            self._token[state] = _NONE

    def _redirect(self, state: int, token: int, target: int) -> None:
        if self._token[state] == token:
            self._target[state] = target
        else:
            self._branches[state][token][0] = target

    def _raise_count(self, state: int, token: int) -> None:
        if self._token[state] == token:
            self._count[state] += 1
        else:
            self._branches[state][token][1] += 1
