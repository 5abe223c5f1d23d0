"""Sets of Unicode scalar values as sorted, disjoint, inclusive ranges."""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Iterable

Ranges = tuple[tuple[int, int], ...]

_MAX = 0x10FFFF
ALL: Ranges = ((0, 0xD7FF), (0xE000, _MAX))
DIGIT: Ranges = ((0x30, 0x39),)
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
LINE_END: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
SPACE: Ranges = (
    (0x09, 0x0D),
    (0x20, 0x20),
    (0xA0, 0xA0),
    (0x1680, 0x1680),
    (0x2000, 0x200A),
    (0x2028, 0x2029),
    (0x202F, 0x202F),
    (0x205F, 0x205F),
    (0x3000, 0x3000),
    (0xFEFF, 0xFEFF),
)
_LONG_CATEGORIES = {
    "letter": "L",
    "uppercase_letter": "Lu",
    "lowercase_letter": "Ll",
    "titlecase_letter": "Lt",
    "modifier_letter": "Lm",
    "other_letter": "Lo",
    "mark": "M",
    "number": "N",
    "decimal_number": "Nd",
    "digit": "Nd",
    "punctuation": "P",
    "punct": "P",
    "symbol": "S",
    "separator": "Z",
    "space_separator": "Zs",
    "control": "Cc",
    "other": "C",
}


def normalise(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Sort, merge and drop surrogates."""
    out: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if out and low <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(out[-1][1], high))
        else:
            out.append((low, high))
    return intersect(tuple(out), ALL)


def intersect(a: Ranges, b: Ranges) -> Ranges:
    out, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        low, high = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if low <= high:
            out.append((low, high))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(out)


def union(a: Ranges, b: Ranges) -> Ranges:
    return normalise((*a, *b))


def invert(ranges: Ranges) -> Ranges:
    out, start = [], 0
    for low, high in ranges:
        if low > start:
            out.append((start, low - 1))
        start = high + 1
    if start <= _MAX:
        out.append((start, _MAX))
    return intersect(tuple(out), ALL)


def contains(ranges: Ranges, code: int) -> bool:
    return any(low <= code <= high for low, high in ranges)


def fold_case(ranges: Ranges) -> Ranges:
    """Add the other case of every letter; sets of more than 2000 members only get their ASCII letters folded."""
    extra: list[tuple[int, int]] = []
    for low, high in ranges:
        for code in range(low, high + 1) if high - low < 2000 else range(max(low, 0x41), min(high, 0x7A) + 1):
            for other in (chr(code).lower(), chr(code).upper()):
                if len(other) == 1:
                    extra.append((ord(other), ord(other)))
    return normalise((*ranges, *extra))


@functools.cache
def category(name: str) -> Ranges | None:
    """The code points of a general category such as `L` or `Nd` (or its long name), or None if unknown."""
    if name in ("Any", "any"):
        return ALL
    if name == "ASCII":
        return ((0, 0x7F),)
    short = _LONG_CATEGORIES.get(name.lower(), name)
    if short not in _categories():
        return None
    return normalise(_categories()[short])


@functools.cache
def _categories() -> dict[str, list[tuple[int, int]]]:
    table: dict[str, list[tuple[int, int]]] = {}
    start, current = 0, unicodedata.category("\0")
    for code in range(1, _MAX + 2):
        kind = unicodedata.category(chr(code)) if code <= _MAX else ""
        if kind != current:
            for key in (current, current[0]):
                table.setdefault(key, []).append((start, code - 1))
            start, current = code, kind
    return table
