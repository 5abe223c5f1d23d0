"""Texts that are worth a try: one that a grammar takes and that repeats nothing shows that something can follow a token."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from deepinfer_structured.guard_reader import Frame, Reader, State, counts, guarded_frames
from deepinfer_structured.guard_tables import Tables, offered

Takes = Callable[[list[int]], bool]
_LETTERS = [b"e", b"a", b"q", b"X", b"0", b"7", b"n"]
_QUOTED = [b'"' + c for c in _LETTERS]
_NUMBERS = [b"7", b"1", b"35", b"64", b"98"]
_TRIES = {
    "string": _LETTERS,
    "key": _LETTERS,
    "value": [*_QUOTED, *_NUMBERS],
    "scalar": [b"]", b"}", *_NUMBERS],
    "after": [b"]", b"}"],
}
_ESCAPES = [b"n", b'"', b"\\"]
_VALUE = re.compile(
    rb'(?<=[:,\[])["0-9-](?:[^"\\:]|\\.)*"?(?=[,\]}])'
)  # a scalar that is an item or a property's value
_HEADS = 4


class Ways:
    """Looks for texts that can follow. Changes nothing.

    Args:
        reader: at the end of the text.
        tables: of the vocabulary.
        texts: its tokens.
        apart: whether no item or key is the beginning of an earlier one after some tokens, read in some state.
    """

    def __init__(
        self, reader: Reader, tables: Tables, texts: list[bytes], apart: Callable[[Iterable[int], State], bool]
    ) -> None:
        self._reader, self._tables, self._texts, self._apart = reader, tables, texts, apart
        self._fresh_of: tuple[bytes, ...] | None = None
        self._fresh_starts: list[bytes] = []

    def lives(self, state: State, token: int, takes: Takes) -> bool:
        """Whether the grammar takes a token and one of a few texts that keeps all apart. False says nothing."""
        if state.mode == "string" and counts(state) and not state.escaped and self._nothing_around(state):
            text = self._texts[token]
            if token in self._tables.next_items:
                return self._next_string(state, token, takes)
            if text[-1] == 0x5C and b'"' not in text and self._is_new(state, text + b"n"):
                return self._taken(token, b"n", takes)
        reader = self._reader
        length = len(reader.text)
        after = reader.run(state, self._texts[token]) if offered(self._tables.usual, [token]) else None
        try:
            return after is not None and self._follows(after, token, takes)
        finally:
            del reader.text[length:]

    def _follows(self, after: State, token: int, takes: Takes) -> bool:
        tries = _ESCAPES if after.escaped else _TRIES.get(after.mode, [])
        if any(self._tried(after, token, more, takes) for more in tries):
            return True
        frame = after.frame
        if after.mode != "value" or frame is None or not frame.is_array or not frame.written:
            return False
        return any(self._tried(after, token, more, takes) for more in _like(frame.written[-1]))

    def _tried(self, after: State, token: int, more: bytes, takes: Takes) -> bool:
        ids = self._tables.single(more)
        return ids is not None and takes([token, *ids]) and self._apart(ids, after)

    def _taken(self, token: int, more: bytes, takes: Takes) -> bool:
        ids = self._tables.single(more)
        return ids is not None and takes([token, *ids])

    def _nothing_around(self, state: State) -> bool:
        """Whether the array at hand is the only one whose items may be repeated."""
        return all(frame is state.frame for frame in guarded_frames(state))

    def _is_new(self, state: State, more: bytes) -> bool:
        assert state.frame is not None
        text = bytes(self._reader.text[state.start :]) + more
        return not any(item.startswith(text) for item in state.frame.written)

    def _next_string(self, state: State, token: int, takes: Takes) -> bool:
        """`lives` for a token from within a string item to the next one."""
        assert state.frame is not None
        more, begun = self._tables.next_items[token]
        item = bytes(self._reader.text[state.start :]) + more
        return item not in state.frame.seen and any(
            not item.startswith(start) and self._taken(token, start[len(begun) :], takes)
            for start in self._fresh(state.frame)
        )

    def _fresh(self, frame: Frame) -> list[bytes]:
        """Beginnings of strings that no item has yet."""
        if self._fresh_of is not frame.written:
            self._fresh_of = frame.written
            self._fresh_starts = [s for s in _QUOTED if not any(item.startswith(s) for item in frame.written)]
        return self._fresh_starts


def _like(item: bytes) -> list[bytes]:
    """Beginnings of items like another one, in which one scalar differs."""
    places = [found.start() for found, _ in zip(_VALUE.finditer(item), range(_HEADS), strict=False)]
    return [item[:at] + more for at in places for more in (_QUOTED if item[at] == 0x22 else _NUMBERS)]
