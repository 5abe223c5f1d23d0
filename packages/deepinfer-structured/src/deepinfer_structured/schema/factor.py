"""One keyword of a schema for one type: where it holds and where it fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deepinfer_structured.errors import InvalidSpec
from deepinfer_structured.schema.cases import Case
from deepinfer_structured.schema.document import Node
from deepinfer_structured.schema.values import dumps, is_integer, kind


@dataclass(frozen=True, slots=True)
class Factor:
    """Both answers are unions of cases, computed when asked. `fails` may leave values out, `holds` may not."""

    holds: Callable[[], list[Case]]
    fails: Callable[[], list[Case]]


def count_of(node: Node, keyword: str) -> int | None:
    """A keyword's value as a non-negative integer (2.0 counts as 2); None if the keyword is absent.

    Raises:
        InvalidSpec: the value is something else.
    """
    value = node.schema.get(keyword)
    if value is None:
        return None
    if kind(value) != "number" or not is_integer(value) or value < 0:
        raise bad_value(node, keyword, "a non-negative integer")
    return int(value)


def bad_value(node: Node, keyword: str, expected: str) -> InvalidSpec:
    """The error for a malformed keyword."""
    got = dumps(node.schema[keyword])[:80]
    return InvalidSpec(f"schema at {node.pointer or '/'}: {keyword} must be {expected}, got {got}")
