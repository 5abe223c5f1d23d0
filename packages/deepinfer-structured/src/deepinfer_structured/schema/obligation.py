"""What a value at one place must satisfy: a set of schemas, each to hold or to fail."""

from __future__ import annotations

from typing import TypeAlias

from deepinfer_structured.schema.document import Node

Obligation: TypeAlias = tuple[tuple[Node, bool], ...]

_IMPOSSIBLE = Node(False, "", 2020, "")
TOP: Obligation = ()
NEVER: Obligation = ((_IMPOSSIBLE, True),)


def must(node: Node, holds: bool = True) -> Obligation:
    """The obligation that one schema holds (or fails)."""
    if isinstance(node.schema, bool) or not node.schema:
        return TOP if (node.schema is not False) == holds else NEVER
    return ((node, holds),)


def join(*obligations: Obligation) -> Obligation:
    """All of them. The order of first appearance is kept: it decides the order of properties."""
    parts: dict[tuple[Node, bool], None] = {}
    for obligation in obligations:
        if obligation == NEVER:
            return NEVER
        parts.update(dict.fromkeys(obligation))
    if any((node, not holds) in parts for node, holds in parts):
        return NEVER
    return tuple(parts)
