"""Checks of single values of a request body. Each takes where the value is and the value, and returns it cleaned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepinfer_offline.job.errors import LineError, show

Check = Callable[[str, Any], Any]


def refuse(where: str, value: Any, allowed: str, *, code: str = "invalid_value") -> LineError:
    """The error of a value that may not be there: `<where> must be <allowed>, got <value>`."""
    return LineError(f"{where} must be {allowed}, got {show(value)}", code=code, param=where)


def integer(low: int, high: int | None = None) -> Check:
    """A check for whole numbers from `low` to `high` (None: no limit). Numbers in quotes and `1.0` are refused."""
    allowed = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"

    def check(where: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise refuse(where, value, allowed, code="invalid_type")
        if value < low or (high is not None and value > high):
            raise refuse(where, value, allowed)
        return value

    return check


def number(low: float, high: float, *, above: bool = False) -> Check:
    """A check for numbers from `low` (or, with `above`, from just above it) to `high`."""
    allowed = f"a number above {low:g} and at most {high:g}" if above else f"a number from {low:g} to {high:g}"

    def check(where: str, value: Any) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise refuse(where, value, allowed, code="invalid_type")
        if not low <= value <= high or (above and value == low):
            raise refuse(where, value, allowed)
        return float(value)

    return check


def boolean(where: str, value: Any) -> bool:
    """Check for true or false."""
    if not isinstance(value, bool):
        raise refuse(where, value, "true or false", code="invalid_type")
    return value


def string(where: str, value: Any) -> str:
    """Check for a string."""
    if not isinstance(value, str):
        raise refuse(where, value, "a string", code="invalid_type")
    return value


def mapping(where: str, value: Any) -> dict[str, Any]:
    """Check for an object."""
    if not isinstance(value, dict):
        raise refuse(where, value, "an object", code="invalid_type")
    return value


def sequence(where: str, value: Any) -> list[Any]:
    """Check for a list with something in it."""
    if not isinstance(value, list):
        raise refuse(where, value, "a list", code="invalid_type")
    if not value:
        raise LineError(f"{where} is empty", code="empty_value", param=where)
    return value


def integers(low: int, high: int | None = None) -> Check:
    """A check for a list of whole numbers from `low` to `high`."""
    item = integer(low, high)

    def check(where: str, value: Any) -> list[int]:
        if not isinstance(value, list):
            raise refuse(where, value, "a list of integers", code="invalid_type")
        return [item(f"{where}[{i}]", entry) for i, entry in enumerate(value)]

    return check


def stops(where: str, value: Any) -> list[str]:
    """Check for a non-empty string or a list of up to 16 of them."""
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise refuse(where, value, "a string or a list of strings", code="invalid_type")
    if len(entries) > 16:
        raise LineError(f"{where} has {len(entries)} strings; at most 16 are allowed", param=where)
    if "" in entries:
        raise LineError(f"{where} holds an empty string, which would end every answer at once", param=where)
    return entries


def bias(where: str, value: Any) -> dict[int, float]:
    """Check for an object of token id (as JSON keys are: in quotes) to a number from -100 to 100."""
    size = number(-100, 100)
    clean = {}
    for key, entry in mapping(where, value).items():
        if not key.isascii() or not key.isdigit() or len(key) > 10:
            raise refuse(where, key, "an object whose keys are token ids")
        clean[int(key)] = size(f"{where}.{key}", entry)
    return clean
