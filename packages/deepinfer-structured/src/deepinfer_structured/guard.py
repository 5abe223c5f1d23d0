"""What no grammar expresses, distinct array items (`uniqueItems`) and distinct keys: a small JSON reader beside the matcher.

The reader follows the text byte by byte. When an item of a guarded array (a key of a guarded object) is complete and
equals an earlier one, the token that completed it is refused, and such tokens are taken out of the mask. To keep that
exact and cheap, a few tokens are never offered while a guard is at work: tokens that could complete two items or keys
at once, and `\\u` or `\\/` spellings.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Hashable, Iterable

from deepinfer_structured.bitmask import Mask
from deepinfer_structured.guard_reader import Frame, Reader, State, counts, guarded_frames
from deepinfer_structured.guard_tables import TokenSet, clear, offered, tables
from deepinfer_structured.guard_values import compact, completions, scalar, spelled
from deepinfer_structured.guard_ways import Takes, Ways
from deepinfer_structured.schema.unique_paths import UniquePaths
from deepinfer_structured.vocab import Vocabulary

_NUMBER = re.compile(rb"-?[0-9][-+.0-9eE]*")


class Guard:
    """Follows the tokens of one sequence."""

    __slots__ = ("_reader", "_states", "_tables", "_ways", "vocabulary")

    def __init__(self, paths: UniquePaths, vocabulary: Vocabulary, *, distinct_keys: bool = False) -> None:
        self.vocabulary = vocabulary
        self._tables = tables(vocabulary)
        self._reader = Reader(paths, distinct_keys)
        self._states: list[tuple[State, int]] = [(State(None), 0)]
        self._ways = Ways(self._reader, self._tables, vocabulary.tokens, self.apart)

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
        frame, depth, guarded = state.frame, 1, False
        while frame is not None:
            if frame.guarded and frame.seen:
                inside, guarded = frame is state.frame, True
                if not inside:
                    if frame.is_array:
                        clear(row, self._repeating(state, row, self._tables.closing(depth - 1)))
                elif frame.is_array:
                    self._clear_items(state, frame, row)
                else:
                    self._clear_keys(state, frame, row)
            frame, depth = frame.parent, depth + 1
        if guarded and state.mode not in ("string", "key"):
            clear(row, self._repeating(state, row, self._tables.powers))
        clear(row, self._repeating(state, row, self._tables.further))

    def along(self, row: Mask) -> list[list[int]]:
        """Tokens of the mask after which all that may follow may be a repetition, or forbidden: to be looked at.

        Those that are read alike are together: what is true of one is true of all.
        """
        state = self._states[-1][0]
        found: list[int] = []
        guarded, in_string = list(guarded_frames(state)), state.mode in ("string", "key")
        if guarded and (not in_string or counts(state)):
            found += self._tables.escaping.offered(row)
        if self._reader.distinct_keys:
            found += self._along_keys(state)
        for frame in guarded:
            if frame.is_array:
                found += self._along_items(state, frame, row)
        crossing = self._tables.crossing[in_string].offered(row)
        if state.mode == "scalar":
            crossing += self._tables.ending.offered(row)
        alike = self._alike(dict.fromkeys(offered(row, found)), state)
        apart = [tokens for key, tokens in self._alike(crossing, state).items() if key not in alike]
        lists = [*alike.values(), *(tokens for tokens in apart if not self._crosses_apart(tokens[0], state))]
        return sorted(lists, key=lambda tokens: -len(self.vocabulary.tokens[tokens[0]]))

    def _alike(self, tokens: Iterable[int], state: State) -> dict[Hashable, list[int]]:
        found: dict[Hashable, list[int]] = {}
        in_string = state.mode in ("string", "key")
        for token in tokens:
            key = token if state.escaped else self._tables.kind(token, in_string)
            found.setdefault(key, []).append(token)
        return found

    def _crosses_apart(self, token: int, state: State) -> bool:
        """Whether all is apart after a token with a comma; not where a string item is the last one read before it."""
        frame = state.frame
        next_item = state.mode == "string" and frame is not None and frame.is_array and frame.guarded
        return not (next_item and not state.escaped and token in self._tables.next_items) and self.apart([token])

    def _along_keys(self, state: State) -> list[int]:
        """Tokens after which a key would be the beginning of an earlier one: all its ends may be taken."""
        ids = self._tables.ids
        found: list[int] = []
        frame, text, inside = state.frame, self._pending(state), state.mode == "key"
        if frame is not None and not frame.is_array and (inside or (state.mode == "value" and not frame.key)):
            for name in frame.seen:
                spelled = _spelled(name)
                if spelled.startswith(text):
                    ends = range(max(len(text) + 1, 2), min(len(spelled), self._reach(spelled, len(text))))
                    found += [t for end in ends for t in ids.get(spelled[len(text) : end], ())]
        while frame is not None and not inside:
            if not frame.is_array:
                for name in frame.seen:
                    spelled = _spelled(name)
                    found += [t for end in range(2, len(spelled)) for t in self._tables.opening.get(spelled[:end], ())]
            frame = frame.parent
        return found

    def _along_items(self, state: State, frame: Frame, row: Mask) -> list[int]:
        """Tokens after which the open item of a frame would be the beginning of an earlier one."""
        table, text = self._tables, self._reader.text
        in_string = state.mode in ("string", "key")
        if frame is state.frame and state.mode == "after":
            return []
        found: list[int] = []
        begun = _begun(state, frame, text)
        table_here = table.ids if state.escaped else table.inside if in_string else table.outside
        for item in frame.written:
            if item.startswith(begun):
                ends = range(len(begun) + 1, min(len(item) + 1, self._reach(item, len(begun))))
                found += [t for end in ends for t in table_here.get(item[len(begun) : end], ())]
        if state.mode in ("value", "scalar"):
            found += self._along_numbers(state, frame, begun, row)
        return found

    def _reach(self, text: bytes, start: int) -> int:
        """One more than where the longest token that may stand at a place of a text could end."""
        return start + 1 + self._tables.reach.get(text[start : start + 2], 1)

    def _along_numbers(self, state: State, frame: Frame, begun: bytes, row: Mask) -> list[int]:
        """Tokens after which a number would be incomplete, or equal to the one at this place of an earlier item."""
        number, table = self._pending(state), self._tables
        taken = _numbers(frame, begun[: len(begun) - len(number)])
        if not taken:
            return []
        found = [t for t in table.numeric_set.offered(row) if _open_or_in(number, table.numeric[t], taken)]
        ends = {more for value in taken for more in completions(number, value, table.longest)}
        return found + [t for more in ends for t in table.digits.get(more, ())]

    @property
    def place(self) -> Hashable:
        """What can follow the text depends on this alone, as long as nothing is taken back."""
        state = self._states[-1][0]
        outer, seen = None, []
        for frame in guarded_frames(state):
            outer = frame
            seen.append(frame.seen)
        start = 0 if outer is None else outer.start
        return state.mode, state.escaped, start, compact(bytes(self._reader.text[start:])), tuple(seen)

    @property
    def in_number(self) -> bool:
        """Whether the text ends within a number, or a literal."""
        return self._states[-1][0].mode == "scalar"

    def lives(self, token: int, takes: Takes) -> bool:
        """Whether a token may come next and one of a few texts can follow it. False says nothing.

        Args:
            token: whitespace it may hold is within bounds.
            takes: whether the grammar takes some tokens.
        """
        return self._ways.lives(self._states[-1][0], token, takes)

    def apart(self, tokens: Iterable[int], state: State | None = None) -> bool:
        """Whether no guarded item or key is the beginning of an earlier one after tokens that the grammar takes.

        `state` is where the reader is, None for where the accepted tokens have brought it.
        """
        data, state = b"".join(self.vocabulary.tokens[t] for t in tokens), state or self._states[-1][0]
        reader = self._reader
        length = len(reader.text)
        after = reader.run(state, data)
        apart = after is not None and not any(self._is_along(after, frame) for frame in guarded_frames(after))
        del reader.text[length:]
        return apart

    def _is_along(self, state: State, frame: Frame) -> bool:
        inside = frame is state.frame
        if not frame.is_array:
            text = self._pending(state)
            return inside and state.mode == "key" and any(_spelled(name).startswith(text) for name in frame.seen)
        if inside and state.mode == "after":
            return False
        begun, pending = _begun(state, frame, self._reader.text), b""
        number = None
        if state.mode == "scalar":
            pending = self._pending(state)
            number = scalar(pending)
            if number is None:
                return True
        if any(item.startswith(begun) for item in frame.written):
            return True
        return number is not None and number in _numbers(frame, begun[: len(begun) - len(pending)])

    def idle(self, row: Mask) -> bool:
        """Whether a mask allows nothing, or blanks between pieces only."""
        in_string = self._states[-1][0].mode in ("string", "key")
        return not (row if in_string else row & ~self._tables.blank).any()

    def _pending(self, state: State) -> bytes:
        return bytes(self._reader.text[state.start :]) if state.mode in ("key", "string", "scalar") else b""

    def _clear_keys(self, state: State, frame: Frame, row: Mask) -> None:
        """Take out the tokens that would complete the key at hand as a repetition."""
        if state.mode != "key" and (state.mode != "value" or frame.key):
            return
        table, text = self._tables, self._pending(state)
        if state.escaped:
            table.second.clear(row)
        for name in frame.seen:
            spelled = _spelled(name)
            if spelled.startswith(text):
                clear(row, table.starting(spelled[len(text) :]))
        if state.mode == "value":
            clear(row, self._repeating(state, row, table.spaced))

    def _repeating(self, state: State, row: Mask, tokens: TokenSet) -> list[int]:
        """Those of some tokens that the mask offers and that repeat an item or a key. The reader reads no others."""
        would_repeat, texts = self._reader.would_repeat, self.vocabulary.tokens
        return [t for t in tokens.offered(row) if would_repeat(state, texts[t])]

    def _clear_items(self, state: State, frame: Frame, row: Mask) -> None:
        """Take out the tokens that would complete the scalar item at hand as a repetition."""
        if state.mode == "after":
            return
        table, text = self._tables, self._pending(state)
        if state.mode in ("value", "string"):
            if state.escaped:
                table.second.clear(row)
            for value in frame.seen:
                if value[:1] == b'"' and value.startswith(text):
                    clear(row, table.starting(value[len(text) :]))
        if state.mode in ("value", "scalar"):
            digits, others = table.runs
            for run, tokens in others.items():
                if scalar(text + run) in frame.seen:
                    tokens.clear(row)
            for more in {more for value in frame.seen for more in completions(text, value, table.longest)}:
                if more in digits:
                    digits[more].clear(row)
        if state.mode == "value":
            for literal, tokens in table.literals.items():
                if literal in frame.seen:
                    tokens.clear(row)
            for tokens in (table.spaced, table.empties):
                clear(row, self._repeating(state, row, tokens))


def _begun(state: State, frame: Frame, text: bytearray) -> bytes:
    """What is written of the open item of a guarded array."""
    return b"" if frame is state.frame and state.mode == "value" else compact(bytes(text[frame.start :]))


def _numbers(frame: Frame, head: bytes) -> set[bytes]:
    """The numbers that follow some beginning in the earlier items of a guarded array."""
    found = (_NUMBER.match(item, len(head)) for item in frame.written if item.startswith(head))
    return {value for number in found if number and (value := scalar(number.group()))}


def _open_or_in(number: bytes, more: bytes, taken: set[bytes]) -> bool:
    return more[-1] in b"-+.eE" or scalar(number + more) in taken


@functools.lru_cache(maxsize=4096)
def _spelled(name: str) -> bytes:
    return spelled(name)


@functools.lru_cache(maxsize=256)
def unique_paths(schema_text: str) -> UniquePaths:
    """The guarded places of a schema, made once."""
    return UniquePaths(schema_text)
