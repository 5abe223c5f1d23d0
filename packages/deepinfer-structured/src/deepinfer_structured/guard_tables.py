"""Lists of the tokens of a vocabulary that the guard has to look at, made once a vocabulary."""

from __future__ import annotations

import bisect
import functools
import re
import weakref
from collections.abc import Callable, Iterable

import numpy as np

from deepinfer_structured.bitmask import Mask, mask_words
from deepinfer_structured.vocab import Vocabulary

SPACE = b" \t\n\r"
_RUN = re.compile(rb"([0-9+\-.eEtrufalsn]*)[,\]}\s]")
_SPACED = re.compile(rb'\s"[^"]*"|\s[0-9.+-]+[,\]}\s]')
_FURTHER = re.compile(rb",\s*[tfn]")
_NEXT_ITEM = re.compile(rb'([^"\\]*")\s*,\s*("?)')
_POWER = re.compile(rb"(?:^|[\s,:\[])[-+.0-9]*[eE](?:[-+0-9,\]}\s]|$)")
_LONG = 256  # bytes; no token is longer
_SHORT = 3  # bytes of texts whose tokens are kept
_MOST_CLOSED = 4
_LITERALS = (b"true", b"false", b"null")
_TWO_SCALARS = re.compile(rb",\s*[-+.0-9eE]+\s")
_STRINGS = re.compile(rb'("(?:[^"\\]|\\.)*(?:"|\\?\Z))', re.DOTALL)
_NUMERIC = re.compile(rb"[-+.0-9eE]+")
_OPENING = re.compile(rb'.*[\s,]("[^"]+)', re.DOTALL)


class TokenSet:
    """Some tokens, as the words and bits of a mask that stand for them."""

    __slots__ = ("_bits", "_words")

    def __init__(self, tokens: Iterable[int]) -> None:
        ids = np.unique(np.fromiter(tokens, np.int64))
        self._words, first = np.unique(ids >> 5, return_index=True)
        bits = np.uint32(1) << (ids & 31).astype(np.uint32)
        self._bits = np.bitwise_or.reduceat(bits, first) if len(ids) else bits

    def offered(self, row: Mask) -> list[int]:
        """Those that a mask allows, ascending."""
        hits = row.view(np.uint32)[self._words] & self._bits
        found: list[int] = []
        for i in hits.nonzero()[0].tolist():
            word, bits = 32 * int(self._words[i]), int(hits[i])
            while bits:
                low = bits & -bits
                found.append(word + low.bit_length() - 1)
                bits ^= low
        return found

    def clear(self, row: Mask) -> None:
        """Take them out of a mask, in place."""
        row.view(np.uint32)[self._words] &= ~self._bits


def offered(row: Mask, tokens: Iterable[int]) -> list[int]:
    """Those of a few tokens that a mask allows."""
    words = row.data.cast("B").cast("I")
    return [t for t in tokens if words[t >> 5] >> (t & 31) & 1]


def clear(row: Mask, tokens: Iterable[int]) -> None:
    """Take a few tokens out of a mask, in place."""
    words = row.data.cast("B").cast("I")
    for token in tokens:
        words[token >> 5] &= ~(1 << (token & 31))


class Tables:
    """Token lists of a vocabulary that the guard needs.

    Attributes:
        usual: mask of the tokens that may be offered under a guard.
        runs: tokens that end a scalar, by what they add to it: digits, and others.
        spaced: tokens with text after leading whitespace that may complete a scalar item.
        literals: tokens that begin a literal, after blanks or none.
        further: tokens that begin a literal after a comma.
        empties: tokens that open and close an array or object, after blanks or none.
        powers: tokens that may hold the exponent of a number.
        digits: tokens of digits, after blanks or none, by their digits.
        numeric: other tokens that are part of a number, without the blanks before them.
        escaping: tokens that end in a backslash.
        ending: tokens that end a number with a blank, with nothing after it that begins another value.
        blank: mask of the tokens of blanks.
        opening: tokens that begin a string after a comma or whitespace, by the part from its quote on.
        ids: tokens by their bytes.
        inside, outside: tokens by their compact text, read from inside a string and from outside one.
        crossing: tokens with a comma; the second set is of those with a quote before it.
        longest: digits of the longest entry of `digits` or `runs`.
        reach: length of the longest token, compact or not, with the same first two bytes.
        next_items: tokens that end a string and then lead to another one, by what they add to the first, with the start of
            the other if they have it.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        special = set(vocabulary.special_ids)
        plain = [(t, i) for i, t in enumerate(vocabulary.tokens) if t and i not in special]
        self._sorted, self._texts = sorted(plain), vocabulary.tokens
        self._singles: dict[bytes, list[int] | None] = {}
        self._kinds: tuple[dict[int, bytes], dict[int, bytes]] = ({}, {})
        self.usual = np.full(mask_words(vocabulary.size), -1, np.int32)
        clear(self.usual, [i for token, i in plain if _unusual(token)])
        usual = [(token, i) for token, i in plain if not _unusual(token)]
        self.ids, self.inside, self.outside = _by_text(usual)
        self.runs = _runs(usual)
        self.blank = np.zeros(mask_words(vocabulary.size), np.int32)
        _set(self.blank, [i for token, i in plain if not token.strip(SPACE)])
        self.opening: dict[bytes, list[int]] = {}
        self.numeric: dict[int, bytes] = {}
        self.digits: dict[bytes, list[int]] = {}
        for token, i in usual:
            if b'"' in token and (begun := _OPENING.fullmatch(token)):
                self.opening.setdefault(begun.group(1), []).append(i)
            if (text := token.lstrip(SPACE)).isdigit():
                self.digits.setdefault(text, []).append(i)
            elif _NUMERIC.fullmatch(text):
                self.numeric[i] = text
        self.longest = max(map(len, [*self.digits, *self.runs[0]]), default=0)
        self.reach: dict[bytes, int] = {}
        for table in (self.ids, self.inside, self.outside):
            for text in table:
                self.reach[text[:2]] = max(len(text), self.reach.get(text[:2], 1))
        found = ((i, _NEXT_ITEM.fullmatch(token)) for token, i in usual)
        self.next_items = {i: (item.group(1), item.group(2) or b"") for i, item in found if item}
        self._sets(usual)

    def _sets(self, usual: list[tuple[bytes, int]]) -> None:
        def those(chosen: Callable[[bytes], object]) -> TokenSet:
            return TokenSet(i for token, i in usual if chosen(token))

        self.spaced = those(lambda t: t[0] in SPACE and _SPACED.search(t))
        self.further = those(_FURTHER.search)
        self.powers = those(_POWER.search)
        self.numeric_set = TokenSet(self.numeric)
        self.escaping = those(lambda t: (len(t) - len(t.rstrip(b"\\"))) % 2)
        self.ending = those(lambda t: t[0] in SPACE and t.lstrip(SPACE)[:1] in (b"", b",", b"]", b"}"))
        self.crossing = those(lambda t: b"," in t), those(lambda t: b'"' in t.partition(b",")[0] and b"," in t)
        self.second = those(lambda t: t[:1] in b"u/")
        self.empties = those(lambda t: t.lstrip(SPACE)[:1] in (b"[", b"{") and (b"]" in t or b"}" in t))
        self.literals = {w: those(functools.partial(_begins, w)) for w in _LITERALS}
        counts = {i: token.count(b"}") + token.count(b"]") for token, i in usual if b"}" in token or b"]" in token}
        self._closing = [TokenSet(i for i, n in counts.items() if n >= least) for least in range(_MOST_CLOSED + 1)]

    def closing(self, least: int) -> TokenSet:
        """Tokens with at least so many closing brackets, and at least one; those with many may be among them all the same."""
        return self._closing[min(least, _MOST_CLOSED)]

    def kind(self, token: int, in_string: bool) -> bytes:
        """What reading a token depends on: its text without the whitespace between its pieces."""
        kinds = self._kinds[in_string]
        if token not in kinds:
            text = self._texts[token]
            kinds[token] = (_bare(b'"' + text) if in_string else _bare(text)) or b" "
        return kinds[token]

    def single(self, text: bytes) -> list[int] | None:
        """A short text in tokens of one byte; None if one is missing."""
        if text not in self._singles:
            ids = [self.ids.get(bytes([b]), [-1])[0] for b in text]
            if len(text) > _SHORT:
                return None if -1 in ids else ids
            self._singles[text] = None if -1 in ids else ids
        return self._singles[text]

    def starting(self, prefix: bytes) -> list[int]:
        """Tokens that start with some bytes."""
        first = bisect.bisect_left(self._sorted, (prefix, -1))
        past = bisect.bisect_left(self._sorted, (prefix + b"\xff" * _LONG, -1), first)
        return [i for _, i in self._sorted[first:past]]


def _by_text(usual: list[tuple[bytes, int]]) -> tuple[dict[bytes, list[int]], ...]:
    """Tokens by their bytes, and by their compact texts inside a string and outside one."""
    ids, inside, outside = {}, {}, {}
    for token, i in usual:
        quoted = b'"' in token
        ids.setdefault(token, []).append(i)
        inside.setdefault(_bare(b'"' + token)[1:] if quoted else token, []).append(i)
        outside.setdefault(_bare(token) if quoted else token.translate(None, SPACE), []).append(i)
    return ids, inside, outside


def _runs(usual: list[tuple[bytes, int]]) -> tuple[dict[bytes, TokenSet], dict[bytes, TokenSet]]:
    found: dict[bytes, list[int]] = {}
    for token, i in usual:
        if run := _RUN.match(token):
            found.setdefault(run.group(1), []).append(i)
    sets = {run: TokenSet(ids) for run, ids in found.items()}
    return {r: s for r, s in sets.items() if r.isdigit()}, {r: s for r, s in sets.items() if not r.isdigit()}


def _begins(literal: bytes, token: bytes) -> bool:
    text = token.lstrip(SPACE)
    return text != b"" and (literal.startswith(text) or text.startswith(literal))


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
