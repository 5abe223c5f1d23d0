"""JSON values: exact numbers, JSON Schema's types and equality, canonical text."""

from __future__ import annotations

import json
from collections.abc import Hashable
from decimal import Decimal
from fractions import Fraction
from typing import Any

from deepinfer_structured.errors import InvalidSpec, LimitExceeded

_MAX_EXPONENT = 400
TYPES = ("null", "boolean", "number", "string", "array", "object")


def load(text: str) -> Any:
    """Parse JSON with exact decimals.

    Raises:
        InvalidSpec: not JSON, or nested too deeply.
    """
    try:
        return json.loads(text, parse_float=_decimal, parse_int=_integer, parse_constant=_constant)
    except LimitExceeded:
        raise
    except (ValueError, RecursionError) as error:
        raise InvalidSpec(f"the JSON schema is not JSON: {error}") from None


def _decimal(text: str) -> Decimal:
    value = Decimal(text)
    if value and abs(value.adjusted()) > _MAX_EXPONENT:
        raise _beyond(text)
    return value


def _integer(text: str) -> int:
    if len(text) > _MAX_EXPONENT + 1:
        raise _beyond(text)
    return int(text)


def _beyond(text: str) -> LimitExceeded:
    shown = text if len(text) <= 40 else f"{text[:20]}... ({len(text)} characters)"
    reason = f"the schema holds the number {shown}, of a size beyond 1e{_MAX_EXPONENT}"
    return LimitExceeded(reason, way_out="write a bound that JSON readers take for a number, or drop the keyword")


def _constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def kind(value: Any) -> str:
    """The JSON type of a value; integers are numbers."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "string"
    if isinstance(value, list):
        return "array"
    return "object" if isinstance(value, dict) else "number"


def canon(value: Any) -> Hashable:
    """A hashable that is equal for values that JSON Schema calls equal (1 and 1.0; objects in any order)."""
    match kind(value):
        case "array":
            return ("array", tuple(canon(v) for v in value))
        case "object":
            return ("object", frozenset((k, canon(v)) for k, v in value.items()))
        case name:
            return (name, value)


def is_integer(value: Any) -> bool:
    """Whether a number is integral, as in 2 and 2.0."""
    return isinstance(value, int) or value == value.to_integral_value()


def divides(divisor: Fraction, value: Any) -> bool:
    """Whether a number is a multiple of `divisor`, exactly."""
    return (Fraction(value) / divisor).denominator == 1


def dumps(value: Any) -> str:
    """Compact JSON text, keys in order."""
    match kind(value):
        case "array":
            return "[" + ",".join(map(dumps, value)) + "]"
        case "object":
            return "{" + ",".join(f"{json.dumps(k, ensure_ascii=False)}:{dumps(v)}" for k, v in value.items()) + "}"
        case "number":
            return str(value)
        case _:
            return json.dumps(value, ensure_ascii=False)


def depth(value: Any, limit: int) -> int:
    """Nesting of a value; stops counting above `limit`. Does not recurse."""
    level, current = 0, [value]
    while current and level <= limit:
        below = []
        for item in current:
            below += list(item.values()) if isinstance(item, dict) else item if isinstance(item, list) else []
        level, current = level + 1, below
    return level
