"""What no grammar expresses, distinct array items (`uniqueItems`) and distinct keys: a small JSON reader beside the matcher.

The reader follows the text byte by byte. When an item of a guarded array (a key of a guarded object) is complete and
equals an earlier one, the token that completed it is refused, and such tokens are taken out of the mask. To keep that
exact and cheap, a few tokens are never offered while a guard is at work: tokens that could complete two items or keys
at once, and `\\u` or `\\/` spellings.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from deepinfer_structured.bitmask import Mask
from deepinfer_structured.guard_tables import SPACE, clear, offered, tables
from deepinfer_structured.guard_values import normal, scalar, spelled
from deepinfer_structured.schema.unique_paths import Place, UniquePaths
from deepinfer_structured.vocab import Vocabulary

_SCALAR = frozenset(b"0123456789+-.eEtrufalsn")
_LITERALS = {ord("t"): b"true", ord("f"): b"false", ord("n"): b"null"}


@dataclass(frozen=True, slots=True)
class Frame:
    """An open array or object. `seen` holds the items of a guarded array or the keys of a guarded object, `start` is the
    offset of an array's current item."""

    parent: Frame | None
    place: Place
    is_array: bool
    guarded: bool = False
    seen: frozenset[Any] = frozenset()  # normal forms of items; keys
    index: int = 0
    start: int = 0
    key: str = ""


@dataclass(frozen=True, slots=True)
class State:
    """Where the reader is. Modes: value, string, scalar, after (a value), key, colon, done; `escaped` within strings."""

    frame: Frame | None
    mode: str = "value"
    start: int = 0  # offset of the scalar, string or key being read
    escaped: bool = False


class Reader:
    """Reads JSON text that a grammar has found well-formed. With `distinct_keys` all objects are guarded."""

    def __init__(self, paths: UniquePaths, distinct_keys: bool) -> None:
        self.paths, self.distinct_keys = paths, distinct_keys
        self.text = bytearray()

    def run(self, state: State, data: bytes) -> State | None:
        """Read `data` at the end of the text; None if it repeats an item. The text keeps the data only on success."""
        length = len(self.text)
        self.text += data
        for offset in range(length, length + len(data)):
            after = self._byte(state, self.text[offset], offset)
            if after is None:
                del self.text[length:]
                return None
            state = after
        return state

    def would_repeat(self, state: State, data: bytes) -> bool:
        """Whether reading `data` repeats an item; the text is unchanged."""
        length = len(self.text)
        repeated = self.run(state, data) is None
        del self.text[length:]
        return repeated

    def _byte(self, state: State, byte: int, offset: int) -> State | None:
        if state.mode in ("string", "key"):
            if state.escaped and byte in b"u/" and _counts(state):
                return None  # a second spelling
            if state.escaped or byte == 0x5C:
                return replace(state, escaped=not state.escaped)
            if byte != 0x22:
                return state
            if state.mode == "string":
                return self._complete(state.frame, state.start, offset + 1)
            assert state.frame is not None
            name = json.loads(bytes(self.text[state.start : offset + 1]))
            seen = state.frame.seen
            if state.frame.guarded:
                if name in seen:
                    return None
                seen |= {name}
            return State(replace(state.frame, key=f"={name}", seen=seen), "colon")  # '=' tells an empty key from none
        if state.mode == "scalar":
            if byte in _SCALAR:
                return state
            done = self._complete(state.frame, state.start, offset)
            return done and self._byte(done, byte, offset)
        return state if byte in SPACE else self._structure(state, byte, offset)

    def _structure(self, state: State, byte: int, offset: int) -> State | None:
        frame, mode = state.frame, state.mode
        if mode == "colon":
            return State(frame, "value")
        if byte in b"]}":
            assert frame is not None
            return self._complete(frame.parent, frame.parent.start if frame.parent else 0, offset + 1)
        if mode == "after":
            assert frame is not None
            return State(replace(frame, index=frame.index + 1) if frame.is_array else frame, "value")
        if frame is not None and not frame.is_array and not frame.key and byte == 0x22:
            return State(frame, "key", offset)
        return self._open(frame, byte, offset)

    def _open(self, frame: Frame | None, byte: int, offset: int) -> State | None:
        if frame is not None:
            if frame.is_array and frame.guarded and _LITERALS.get(byte) in frame.seen:
                return None  # once begun, a literal has one way to go on
            frame = replace(frame, start=offset)
        if byte in b"[{":
            if frame is None:
                place = self.paths.root
            else:
                place = self.paths.step(frame.place, frame.index if frame.is_array else frame.key[1:])
            is_array = byte == 0x5B
            guarded = self.paths.unique(place) if is_array else self.distinct_keys
            return State(Frame(frame, place, is_array, guarded), "value")
        return State(frame, "string" if byte == 0x22 else "scalar", offset)

    def _complete(self, frame: Frame | None, start: int, end: int) -> State | None:
        """A value text[start:end] is complete inside `frame`."""
        if frame is None:
            return State(None, "done")
        if frame.is_array and frame.guarded:
            value = normal(bytes(self.text[start:end]))
            if value in frame.seen:
                return None
            frame = replace(frame, seen=frame.seen | {value})
        return State(replace(frame, key=""), "after")


class Guard:
    """Follows the tokens of one sequence."""

    __slots__ = ("_reader", "_states", "_tables", "vocabulary")

    def __init__(self, paths: UniquePaths, vocabulary: Vocabulary, *, distinct_keys: bool = False) -> None:
        self.vocabulary = vocabulary
        self._tables = tables(vocabulary)
        self._reader = Reader(paths, distinct_keys)
        self._states: list[tuple[State, int]] = [(State(None), 0)]

    def accept(self, token: int) -> bool:
        """Read a token; False, and nothing is read, if it repeats an item or key, or is never offered under a guard."""
        if not offered(self._tables.usual, [token]):
            return False
        state = self._reader.run(self._states[-1][0], self.vocabulary.tokens[token])
        if state is None:
            return False
        self._states.append((state, len(self._reader.text)))
        return True

    def rollback(self, count: int) -> None:
        """Forget the last `count` tokens."""
        del self._states[len(self._states) - count :]
        del self._reader.text[self._states[-1][1] :]

    def clone(self) -> Guard:
        """An independent copy."""
        other = Guard(self._reader.paths, self.vocabulary, distinct_keys=self._reader.distinct_keys)
        other._reader.text = self._reader.text[:]
        other._states = self._states[:]
        return other

    def restrict(self, row: Mask) -> None:
        """Take out of a mask what would repeat an item or a key, in place."""
        row &= self._tables.usual
        state = self._states[-1][0]
        frame, depth = state.frame, 1
        while frame is not None:
            if frame.guarded and frame.seen:
                inside = frame is state.frame
                if frame.is_array:
                    clear(row, self._next_item(state, frame, row) if inside else self._closing(state, row, depth))
                elif inside:
                    clear(row, self._next_key(state, frame, row))
            frame, depth = frame.parent, depth + 1
        clear(row, self._repeating(state, row, self._tables.further))

    def along(self, row: Mask) -> list[int]:
        """Tokens of the mask after which a key would be the beginning of an earlier one: all its ends may be taken."""
        if not self._reader.distinct_keys:
            return []
        state, ids = self._states[-1][0], self._tables.ids
        found: list[int] = []
        frame, text, inside = state.frame, self._pending(state), state.mode == "key"
        if frame is not None and not frame.is_array and (inside or (state.mode == "value" and not frame.key)):
            for name in frame.seen:
                spelled = _spelled(name)
                if spelled.startswith(text):
                    ends = range(max(len(text) + 1, 2), len(spelled))
                    found += [t for end in ends for t in ids.get(spelled[len(text) : end], ())]
        while frame is not None and not inside:
            if not frame.is_array:
                for name in frame.seen:
                    spelled = _spelled(name)
                    found += [t for end in range(2, len(spelled)) for t in self._tables.opening.get(spelled[:end], ())]
            frame = frame.parent
        return offered(row, dict.fromkeys(found))

    @property
    def written(self) -> bytes:
        """The part of the value or key at hand that is written."""
        return self._pending(self._states[-1][0])

    def _pending(self, state: State) -> bytes:
        return bytes(self._reader.text[state.start :]) if state.mode in ("key", "string", "scalar") else b""

    def _next_key(self, state: State, frame: Frame, row: Mask) -> Iterable[int]:
        """Tokens that would complete the key at hand as a repetition."""
        if state.mode != "key" and (state.mode != "value" or frame.key):
            return ()
        table, text = self._tables, self._pending(state)
        found: list[int] = []
        if state.escaped:
            found += table.starting(b"u") + table.starting(b"/")
        for name in frame.seen:
            spelled = _spelled(name)
            if spelled.startswith(text):
                found += table.starting(spelled[len(text) :])
        if state.mode == "value":
            found += self._repeating(state, row, table.spaced)
        return found

    def _repeating(self, state: State, row: Mask, tokens: Iterable[int]) -> list[int]:
        """Those of some tokens that the mask offers and that repeat an item or a key. The reader reads no others."""
        would_repeat, texts = self._reader.would_repeat, self.vocabulary.tokens
        return [t for t in offered(row, tokens) if would_repeat(state, texts[t])]

    def _next_item(self, state: State, frame: Frame, row: Mask) -> Iterable[int]:
        """Tokens that would complete the scalar item at hand as a repetition."""
        if state.mode == "after":
            return ()
        table, text = self._tables, self._pending(state)
        found: list[int] = []
        if state.mode in ("value", "string"):
            if state.escaped:
                found += table.starting(b"u") + table.starting(b"/")
            for value in frame.seen:
                if value[:1] == b'"' and value.startswith(text):
                    found += table.starting(value[len(text) :])
        if state.mode in ("value", "scalar"):
            for run, ids in table.runs.items():
                if scalar(text + run) in frame.seen:
                    found += ids
        if state.mode == "value":
            found += [t for b, value in _LITERALS.items() if value in frame.seen for t in table.starting(bytes([b]))]
            found += self._repeating(state, row, [*table.spaced, *table.empties])
        return found

    def _closing(self, state: State, row: Mask, depth: int) -> list[int]:
        """Tokens with enough closing brackets to complete a structured item as a repetition."""
        candidates = row & self._tables.closing
        bits = np.unpackbits(candidates.view(np.uint8), bitorder="little")
        tokens, out = self.vocabulary.tokens, []
        for token in np.flatnonzero(bits).tolist():
            data = tokens[token]
            if data.count(b"}") + data.count(b"]") >= depth - 1 and self._reader.would_repeat(state, data):
                out.append(token)
        return out


def _counts(state: State) -> bool:
    """Whether the string or key at hand must differ from others."""
    frame = state.frame
    return frame is not None and frame.guarded and bool(frame.seen) and frame.is_array == (state.mode == "string")


@functools.lru_cache(maxsize=4096)
def _spelled(name: str) -> bytes:
    return spelled(name)


@functools.lru_cache(maxsize=256)
def unique_paths(schema_text: str) -> UniquePaths:
    """The guarded places of a schema, made once."""
    return UniquePaths(schema_text)
