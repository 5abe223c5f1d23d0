"""One keyword of a schema for one type: where it holds and where it fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deepinfer_structured.errors import InvalidSpec, LimitExceeded
from deepinfer_structured.schema.cases import Case
from deepinfer_structured.schema.document import Node
from deepinfer_structured.schema.values import dumps, is_integer, kind

_LARGEST = 2**31 - 1  # what the grammar library counts to


@dataclass(frozen=True, slots=True)
class Factor:
    """Both answers are unions of cases, computed when asked. `fails` may leave values out, `holds` may not."""

    holds: Callable[[], list[Case]]
    fails: Callable[[], list[Case]]


def count_of(node: Node, keyword: str) -> int | None:
    """A keyword's value as a non-negative integer (2.0 counts as 2); None if the keyword is absent.

    Raises:
        InvalidSpec: the value is something else.
        LimitExceeded: a lower bound beyond what can be counted. An upper bound beyond that is as good as absent.
    """
    value = node.schema.get(keyword)
    if value is None:
        return None
    if kind(value) != "number" or not is_integer(value) or value < 0:
        raise bad_value(node, keyword, "a non-negative integer")
    if value <= _LARGEST:
        return int(value)
    if keyword.startswith("max"):
        return None  # no text is that long
    reason = f"no text reaches {dumps(value)[:80]}, the largest count is {_LARGEST}"
    raise LimitExceeded(reason, node.pointer, keyword, "lower it, or drop the keyword")


def bad_value(node: Node, keyword: str, expected: str) -> InvalidSpec:
    """The error for a malformed keyword."""
    got = dumps(node.schema[keyword])[:80]
    way_out = "correct the value, or drop the keyword"
    return InvalidSpec(f"schema at {node.pointer or '/'}: {keyword} must be {expected}, got {got}. Way out: {way_out}")
