"""Lists of the tokens of a vocabulary that the guard has to look at, made once a vocabulary."""

from __future__ import annotations

import bisect
import functools
import re
import weakref
from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from deepinfer_structured.bitmask import Mask, mask_words
from deepinfer_structured.vocab import Vocabulary

SPACE = b" \t\n\r"
_RUN = re.compile(rb"([0-9+\-.eEtrufalsn]*)[,\]}\s]")
_SPACED = re.compile(rb'\s"[^"]*"|\s[0-9.+-]+[,\]}\s]|\s[tfn]')
_FURTHER = re.compile(rb",\s*[tfn]")
_TWO_SCALARS = re.compile(rb",\s*[-+.0-9eE]+\s")
_STRINGS = re.compile(rb'("(?:[^"\\]|\\.)*(?:"|\\?\Z))', re.DOTALL)
_LETTERS = [b"a", b"q", b"X", b"0", b"7", b"n"]
_TRIES = {
    "string": _LETTERS,
    "key": _LETTERS,
    "value": [*(b'"' + c for c in _LETTERS), b"7", b"1", b"35"],
    "scalar": [b"]", b"}", b"7", b"1", b"35"],
    "after": [b"]", b"}"],
}
_NUMERIC = re.compile(rb"[-+.0-9eE]+")
_OPENING = re.compile(rb'.*[\s,]("[^"]+)', re.DOTALL)


def offered(row: Mask, tokens: Iterable[int]) -> list[int]:
    """Those of some tokens that a mask allows."""
    words = row.view(np.uint32)
    return [t for t in tokens if words[t // 32] >> (t % 32) & 1]


def clear(row: Mask, tokens: Iterable[int]) -> None:
    """Take tokens out of a mask, in place."""
    ids = np.fromiter(tokens, np.int64)
    if len(ids):
        np.bitwise_and.at(row.view(np.uint32), ids >> 5, ~(np.uint32(1) << (ids & 31).astype(np.uint32)))


class Tables:
    """Token lists of a vocabulary that the guard needs.

    Attributes:
        usual: mask of the tokens that may be offered under a guard.
        closing: mask of the tokens with a closing bracket.
        runs: tokens that end a scalar, by what they add to it.
        spaced: tokens with text after leading whitespace that may complete a scalar item.
        further: tokens that begin a literal after a comma.
        empties: tokens that open and close an array or object, after blanks or none.
        numeric: tokens that are part of a number, after blanks or none, without the blanks.
        escaping: tokens that end in a backslash.
        ending: tokens that end a number with a blank, with nothing after it that begins another value.
        blank: mask of the tokens of blanks.
        opening: tokens that begin a string after a comma or whitespace, by the part from its quote on.
        ids: tokens by their bytes.
        inside, outside: tokens by their compact text, read from inside a string and from outside one.
        crossing: tokens with a comma; the second list is of those with a quote before it.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        special = set(vocabulary.special_ids)
        plain = [(t, i) for i, t in enumerate(vocabulary.tokens) if t and i not in special]
        self._sorted = sorted(plain)
        self.usual = np.full(mask_words(vocabulary.size), -1, np.int32)
        self.closing = np.zeros(mask_words(vocabulary.size), np.int32)
        self.runs: dict[bytes, list[int]] = {}
        self.spaced: list[int] = []
        self.further: list[int] = []
        self.empties: list[int] = []
        self.opening: dict[bytes, list[int]] = {}
        self.numeric: list[tuple[bytes, int]] = []
        self.escaping: list[int] = []
        self.ending: list[int] = []
        self.blank = np.zeros(mask_words(vocabulary.size), np.int32)
        self.ids: dict[bytes, list[int]] = {}
        self.inside: dict[bytes, list[int]] = {}
        self.outside: dict[bytes, list[int]] = {}
        self.crossing: tuple[list[int], list[int]] = ([], [])
        closing = []
        for token, i in plain:
            if _unusual(token):
                clear(self.usual, [i])
                continue
            self._index(token, i)
            if b'"' in token and (begun := _OPENING.fullmatch(token)):
                self.opening.setdefault(begun.group(1), []).append(i)
            if b"}" in token or b"]" in token:
                closing.append(i)
                if token.lstrip(SPACE)[:1] in (b"[", b"{"):
                    self.empties.append(i)
            if (run := _RUN.match(token)) and (run.group(1) or token[:1] not in SPACE):
                self.runs.setdefault(run.group(1), []).append(i)
            elif run:
                self.runs.setdefault(b"", []).append(i)
            if token[0] in SPACE and _SPACED.search(token):
                self.spaced.append(i)
            if _FURTHER.search(token):
                self.further.append(i)
        _set(self.closing, closing)
        _set(self.blank, [i for token, i in plain if not token.strip(SPACE)])

    @functools.cached_property
    def tries(self) -> defaultdict[str, list[list[int]]]:
        """Texts of single-byte tokens that often may follow, by the mode of the reader."""
        found: defaultdict[str, list[list[int]]] = defaultdict(list)
        for mode, texts in _TRIES.items():
            for text in texts:
                tokens = [self.ids.get(bytes([b]), [-1])[0] for b in text]
                if -1 not in tokens:
                    found[mode].append(tokens)
        return found

    def _index(self, token: bytes, i: int) -> None:
        """File a token under its bytes and its compact texts."""
        self.ids.setdefault(token, []).append(i)
        quoted = b'"' in token
        self.inside.setdefault(_bare(b'"' + token)[1:] if quoted else token, []).append(i)
        self.outside.setdefault(_bare(token) if quoted else token.translate(None, SPACE), []).append(i)
        before, comma, _ = token.partition(b",")
        if comma:
            self.crossing[0].append(i)
            if b'"' in before:
                self.crossing[1].append(i)
        if _NUMERIC.fullmatch(text := token.lstrip(SPACE)):
            self.numeric.append((text, i))
        if token[0] in SPACE and text[:1] in (b"", b",", b"]", b"}"):
            self.ending.append(i)
        if (len(token) - len(token.rstrip(b"\\"))) % 2:
            self.escaping.append(i)

    def starting(self, prefix: bytes) -> list[int]:
        """Tokens that start with some bytes."""
        first = bisect.bisect_left(self._sorted, (prefix, -1))
        out = []
        for token, i in self._sorted[first:]:
            if not token.startswith(prefix):
                break
            out.append(i)
        return out


def _unusual(token: bytes) -> bool:
    """Whether a token could complete two items, or spells a character in a second way."""
    rest = token.partition(b",")[2]
    two = rest.count(b'"') > 1 or any(b in rest for b in b",]}") or _TWO_SCALARS.search(token) is not None
    return two or b"\\u" in token or b"\\/" in token


def _bare(text: bytes) -> bytes:
    """Text without the whitespace outside its strings."""
    return b"".join(part if k % 2 else part.translate(None, SPACE) for k, part in enumerate(_STRINGS.split(text)))


def _set(mask: Mask, tokens: Iterable[int]) -> None:
    words = mask.view(np.uint32)
    for i in tokens:
        words[i // 32] |= np.uint32(1 << (i % 32))


_made: weakref.WeakKeyDictionary[Vocabulary, Tables] = weakref.WeakKeyDictionary()


def tables(vocabulary: Vocabulary) -> Tables:
    """The tables of a vocabulary, made once."""
    if vocabulary not in _made:
        _made[vocabulary] = Tables(vocabulary)
    return _made[vocabulary]
