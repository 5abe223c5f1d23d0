"""A small JSON reader: follows generated text byte by byte and tells repeated items of guarded arrays and repeated keys."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from deepinfer_structured.guard_tables import SPACE
from deepinfer_structured.guard_values import written
from deepinfer_structured.schema.unique_paths import Place, UniquePaths

_SPECIAL = re.compile(rb'["\\]')
_SCALAR = frozenset(b"0123456789+-.eEtrufalsn")
LITERALS = {ord("t"): b"true", ord("f"): b"false", ord("n"): b"null"}


class Frame(NamedTuple):
    """An open array or object. `seen` holds the items of a guarded array or the keys of a guarded object, `written` the
    compact texts of these items, `start` is the offset of an array's current item or an object's current key."""

    parent: Frame | None
    place: Place
    is_array: bool
    guarded: bool = False
    seen: frozenset[Any] = frozenset()  # normal forms of items; keys
    written: tuple[bytes, ...] = ()
    above: Frame | None = None  # the nearest guarded one around
    index: int = 0
    start: int = 0
    key: str = ""


class State(NamedTuple):
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
        offset, end = length, length + len(data)
        while offset < end:
            if state.mode in ("string", "key") and not state.escaped:
                special = _SPECIAL.search(data, offset - length)
                if special is None:
                    break
                offset = length + special.start()
            after = self._byte(state, self.text[offset], offset)
            if after is None:
                del self.text[length:]
                return None
            state, offset = after, offset + 1
        return state

    def would_repeat(self, state: State, data: bytes) -> bool:
        """Whether reading `data` repeats an item; the text is unchanged."""
        length = len(self.text)
        repeated = self.run(state, data) is None
        del self.text[length:]
        return repeated

    def _byte(self, state: State, byte: int, offset: int) -> State | None:
        if state.mode in ("string", "key"):
            if state.escaped and byte in b"u/" and counts(state):
                return None  # a second spelling
            if state.escaped or byte == 0x5C:
                return state._replace(escaped=not state.escaped)
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
            return State(state.frame._replace(key=f"={name}", seen=seen), "colon")  # '=' tells an empty key from none
        if state.mode == "scalar":
            if byte in _SCALAR:
                return None if byte in b"eE" and self._is_zero(state, offset) else state
            done = self._complete(state.frame, state.start, offset)
            return done and self._byte(done, byte, offset)
        return state if byte in SPACE else self._structure(state, byte, offset)

    def _is_zero(self, state: State, offset: int) -> bool:
        """Whether the number at hand counts and is zero so far: as an exponent would leave it, whatever its digits."""
        zero = not bytes(self.text[state.start : offset]).strip(b"-0.")
        return zero and next(guarded_frames(state), None) is not None

    def _structure(self, state: State, byte: int, offset: int) -> State | None:
        frame, mode = state.frame, state.mode
        if mode == "colon":
            return State(frame, "value")
        if byte in b"]}":
            assert frame is not None
            return self._complete(frame.parent, frame.parent.start if frame.parent else 0, offset + 1)
        if mode == "after":
            assert frame is not None
            return State(frame._replace(index=frame.index + 1) if frame.is_array else frame, "value")
        if frame is not None and not frame.is_array and not frame.key and byte == 0x22:
            return State(frame._replace(start=offset), "key", offset)
        return self._open(frame, byte, offset)

    def _open(self, frame: Frame | None, byte: int, offset: int) -> State | None:
        if frame is not None:
            if frame.is_array and frame.guarded and LITERALS.get(byte) in frame.seen:
                return None  # once begun, a literal has one way to go on
            if frame.is_array:
                frame = frame._replace(start=offset)
        if byte in b"[{":
            if frame is None:
                place = self.paths.root
            else:
                place = self.paths.step(frame.place, frame.index if frame.is_array else frame.key[1:])
            is_array = byte == 0x5B
            guarded = self.paths.unique(place) if is_array else self.distinct_keys
            above = frame if frame is None or frame.guarded else frame.above
            return State(Frame(frame, place, is_array, guarded, above=above), "value")
        return State(frame, "string" if byte == 0x22 else "scalar", offset)

    def _complete(self, frame: Frame | None, start: int, end: int) -> State | None:
        """A value text[start:end] is complete inside `frame`."""
        if frame is None:
            return State(None, "done")
        if frame.is_array and frame.guarded:
            value, short = written(bytes(self.text[start:end]))
            if value in frame.seen:
                return None
            frame = frame._replace(seen=frame.seen | {value}, written=(*frame.written, short))
        return State(frame._replace(key=""), "after")


def guarded_frames(state: State) -> Iterator[Frame]:
    """The open frames in which something may be repeated, from the innermost."""
    frame = state.frame
    while frame is not None:
        if frame.guarded and frame.seen:
            yield frame
        frame = frame.above


def counts(state: State) -> bool:
    """Whether the string or key at hand must differ from others."""
    frame = state.frame
    return frame is not None and frame.guarded and bool(frame.seen) and frame.is_array == (state.mode == "string")
