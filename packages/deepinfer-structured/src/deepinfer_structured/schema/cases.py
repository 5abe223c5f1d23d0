"""Conjunctions of constraints on values of one type, and their intersection.

A schema restricted to one JSON type becomes a list of cases: the union of conjunctions. `meet` intersects two cases and
returns None where the result is plainly empty.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from math import gcd, lcm
from typing import Any, TypeAlias

from deepinfer_structured.regex import Node as Language
from deepinfer_structured.schema.obligation import NEVER, TOP, Obligation, join
from deepinfer_structured.schema.values import canon


@dataclass(frozen=True, slots=True)
class Values:
    """One of finitely many values, all of one type."""

    kind: str
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Number:
    """A number within bounds. `integer` False asks for a number that is not integral."""

    low: Decimal | None = None
    low_open: bool = False
    high: Decimal | None = None
    high_open: bool = False
    integer: bool | None = None
    multiple: Fraction | None = None
    non_multiples: tuple[Fraction, ...] = ()
    holes: tuple[Decimal, ...] = ()
    kind: str = "number"

    def empty(self) -> bool:
        """Whether no number is within the bounds, counting `integer` and `multiple`."""
        if self.low is None or self.high is None:
            return False
        if self.low > self.high or (self.low == self.high and (self.low_open or self.high_open)):
            return True
        step = Fraction(1) if self.integer and self.multiple is None else self.multiple
        if step is None:
            return False
        low, high = Fraction(self.low), Fraction(self.high)
        first = -(-low // step) * step
        if self.low_open and first == low:
            first += step
        return first > high or (first == high and self.high_open)


@dataclass(frozen=True, slots=True)
class String:
    """A string in every one of the languages, of `low` to `high` code points."""

    languages: tuple[Language, ...] = ()
    low: int = 0
    high: int | None = None
    kind: str = "string"


@dataclass(frozen=True, slots=True)
class Items:
    """The items of an array by position: a prefix, then all the rest."""

    prefix: tuple[Obligation, ...] = ()
    rest: Obligation = TOP


@dataclass(frozen=True, slots=True)
class Contains:
    """From position `start` on, `low` to `high` items meet an obligation; `opposite` is its complement."""

    wanted: Obligation
    opposite: Obligation | None
    start: int = 0
    low: int = 1
    high: int | None = None


@dataclass(frozen=True, slots=True)
class SeenItems:
    """Which items the schemas of a case have evaluated, for `unevaluatedItems`."""

    count: int = 0
    all: bool = False
    matching: tuple[Obligation, ...] = ()


@dataclass(frozen=True, slots=True)
class Array:
    """An array of `low` to `high` items."""

    items: tuple[Items, ...] = ()
    low: int = 0
    high: int | None = None
    contains: tuple[Contains, ...] = ()
    unique: bool = False
    seen: SeenItems = SeenItems()
    kind: str = "array"

    def at(self, index: int) -> Obligation:
        """What the item at a position must satisfy."""
        return join(*(g.prefix[index] if index < len(g.prefix) else g.rest for g in self.items))


@dataclass(frozen=True, slots=True)
class Properties:
    """The values of an object by key: names, then patterns, then the rest, as in one schema object.

    A dict's order is part of the value: it is the order in which properties are written.
    """

    names: tuple[tuple[str, Obligation], ...] = ()
    patterns: tuple[tuple[Language, Obligation], ...] = ()
    rest: Obligation = TOP


@dataclass(frozen=True, slots=True)
class SeenProperties:
    """Which properties the schemas of a case have evaluated, for `unevaluatedProperties`."""

    names: tuple[str, ...] = ()
    patterns: tuple[Language, ...] = ()
    all: bool = False


@dataclass(frozen=True, slots=True)
class Object:
    """An object of `low` to `high` properties.

    Attributes:
        keys: languages that every key is in.
        exists: for each, at least one property with a key in the language and a value that meets the obligation.
    """

    properties: tuple[Properties, ...] = ()
    required: tuple[str, ...] = ()
    low: int = 0
    high: int | None = None
    keys: tuple[Language, ...] = ()
    exists: tuple[tuple[Language, Obligation], ...] = ()
    seen: SeenProperties = field(default=SeenProperties())
    kind: str = "object"


Case: TypeAlias = Values | Number | String | Array | Object

ANY: dict[str, Case] = {
    "null": Values("null", (None,)),
    "boolean": Values("boolean", (False, True)),
    "number": Number(),
    "string": String(),
    "array": Array(),
    "object": Object(),
}


def unseen(case: Case) -> Case:
    """The case without its record of evaluated parts."""
    if isinstance(case, Array):
        return replace(case, seen=SeenItems())
    if isinstance(case, Object):
        return replace(case, seen=SeenProperties())
    return case


def meet(a: Case, b: Case) -> Case | None:
    """What is in both; None if that is plainly nothing. Values are not checked against constraints here."""
    if isinstance(a, Number) and isinstance(b, Number):
        return _meet_numbers(a, b)
    if isinstance(a, String) and isinstance(b, String):
        languages = tuple(dict.fromkeys(a.languages + b.languages))
        low, high = max(a.low, b.low), _least(a.high, b.high)
        return None if high is not None and low > high else String(languages, low, high)
    if isinstance(a, Array) and isinstance(b, Array):
        return _meet_arrays(a, b)
    if isinstance(a, Object) and isinstance(b, Object):
        return _meet_objects(a, b)
    if isinstance(a, Values) and isinstance(b, Values):
        keys = {canon(v) for v in b.values}
        kept = tuple(v for v in a.values if canon(v) in keys)
        return Values(a.kind, kept) if kept else None
    raise TypeError(f"cannot intersect {type(a).__name__} and {type(b).__name__}")


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def _meet_numbers(a: Number, b: Number) -> Number | None:
    if a.integer is not None and b.integer is not None and a.integer != b.integer:
        return None
    low, low_open = _tighter(a.low, a.low_open, b.low, b.low_open, 1)
    high, high_open = _tighter(a.high, a.high_open, b.high, b.high_open, -1)
    multiple = a.multiple if b.multiple is None else b.multiple if a.multiple is None else _lcm(a.multiple, b.multiple)
    found = Number(
        low,
        low_open,
        high,
        high_open,
        a.integer if b.integer is None else b.integer,
        multiple,
        tuple(dict.fromkeys(a.non_multiples + b.non_multiples)),
        tuple(dict.fromkeys(a.holes + b.holes)),
    )
    if multiple is not None and any(multiple % m == 0 for m in found.non_multiples):
        return None
    if found.integer is False and multiple is not None and multiple.denominator == 1:
        return None
    if found.integer and any(m.numerator == 1 for m in found.non_multiples):
        return None
    return None if found.empty() else found


def _tighter(
    a: Decimal | None, a_open: bool, b: Decimal | None, b_open: bool, sign: int
) -> tuple[Decimal | None, bool]:
    if a is None or b is None:
        return (b, b_open) if a is None else (a, a_open)
    if a == b:
        return a, a_open or b_open
    return (a, a_open) if (a - b) * sign > 0 else (b, b_open)


def _lcm(a: Fraction, b: Fraction) -> Fraction:
    return Fraction(lcm(a.numerator, b.numerator), gcd(a.denominator, b.denominator))


def _meet_arrays(a: Array, b: Array) -> Array | None:
    low, high = max(a.low, b.low), _least(a.high, b.high)
    if high is not None and low > high:
        return None
    seen = SeenItems(
        max(a.seen.count, b.seen.count),
        a.seen.all or b.seen.all,
        tuple(dict.fromkeys(a.seen.matching + b.seen.matching)),
    )
    items = tuple(dict.fromkeys(a.items + b.items))
    contains = tuple(dict.fromkeys(a.contains + b.contains))
    found = Array(items, low, high, contains, a.unique or b.unique, seen)
    if any(found.at(i) == NEVER for i in range(min(low, 64))):
        return None
    return found


def _meet_objects(a: Object, b: Object) -> Object | None:
    low, high = max(a.low, b.low), _least(a.high, b.high)
    required = tuple(dict.fromkeys(a.required + b.required))
    if high is not None and (low > high or len(required) > high):
        return None
    seen = SeenProperties(
        tuple(dict.fromkeys(a.seen.names + b.seen.names)),
        tuple(dict.fromkeys(a.seen.patterns + b.seen.patterns)),
        a.seen.all or b.seen.all,
    )
    return Object(
        tuple(dict.fromkeys(a.properties + b.properties)),
        required,
        low,
        high,
        tuple(dict.fromkeys(a.keys + b.keys)),
        tuple(dict.fromkeys(a.exists + b.exists)),
        seen,
    )
