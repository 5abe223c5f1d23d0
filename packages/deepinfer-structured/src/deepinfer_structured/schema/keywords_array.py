"""Keywords of arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from deepinfer_structured.errors import UnsupportedSchema
from deepinfer_structured.schema import cases as c
from deepinfer_structured.schema.document import Node
from deepinfer_structured.schema.factor import Factor, bad_value, count_of
from deepinfer_structured.schema.obligation import NEVER, TOP, Obligation, must

if TYPE_CHECKING:
    from deepinfer_structured.schema.solver import Solver


def factors(solver: Solver, node: Node) -> Iterator[Factor]:
    """`prefixItems`, `items`, `additionalItems`, `minItems`, `maxItems`, `contains`, `uniqueItems`."""
    yield from _items(solver, node)
    low, high = count_of(node, "minItems"), count_of(node, "maxItems")
    if low:
        yield Factor(lambda: [c.Array(low=low)], lambda: [c.Array(high=low - 1)])
    if high is not None:
        yield Factor(lambda: [c.Array(high=high)], lambda: [c.Array(low=high + 1)])
    if "contains" in node.schema and node.draft >= 6:
        yield _contains(solver, node)
    unique = node.schema.get("uniqueItems")
    if unique is True:
        yield Factor(lambda: [c.Array(unique=True)], lambda: _repeated(node))
    elif unique not in (None, False):
        raise bad_value(node, "uniqueItems", "true or false")


def _repeated(node: Node) -> list[c.Case]:
    way_out = "drop the `not`, or say which item repeats by `contains` with minContains 2"
    raise UnsupportedSchema(node.pointer, "uniqueItems", "arrays that repeat an item are not expressible", way_out)


def _items(solver: Solver, node: Node) -> Iterator[Factor]:
    schema, document = node.schema, solver.document
    tuple_key = "prefixItems" if node.draft >= 2020 and "prefixItems" in schema else "items"
    listed = schema.get(tuple_key)
    prefix: list[Obligation] = []
    rest_key: str | None = "items"
    if isinstance(listed, list):
        prefix = [must(document.child(node, tuple_key, i)) for i in range(len(listed))]
        rest_key = "additionalItems" if tuple_key == "items" else "items"
    if rest_key not in schema:
        rest_key = None
    if rest_key is None and not prefix:
        return
    rest = must(document.child(node, rest_key)) if rest_key else TOP
    count = len(prefix)
    seen = c.SeenItems(count=count, all=rest_key is not None)

    def fails() -> list[c.Case]:
        found: list[c.Case] = []
        for i in range(count):
            wrong = must(document.child(node, tuple_key, i), False)
            if wrong != NEVER:
                found.append(c.Array(items=(c.Items((TOP,) * i + (wrong,)),), low=i + 1))
        if rest_key is not None:
            inner = document.child(node, rest_key)
            wrong = must(inner, False)
            if wrong == TOP:
                found.append(c.Array(low=count + 1))
            elif wrong != NEVER:
                found.append(c.Array(contains=(c.Contains(wrong, must(inner), start=count),)))
        return found

    yield Factor(lambda: [c.Array(items=(c.Items(tuple(prefix), rest),), seen=seen)], fails)


def _contains(solver: Solver, node: Node) -> Factor:
    inner = solver.document.child(node, "contains")
    wanted, opposite = must(inner), must(inner, False)
    low, high = 1, None
    if node.draft >= 2019:
        given = count_of(node, "minContains")
        low, high = 1 if given is None else given, count_of(node, "maxContains")
    seen = c.SeenItems(matching=(wanted,)) if node.draft >= 2020 else c.SeenItems()

    def counted(low: int, high: int | None) -> list[c.Case]:
        if high is not None and low > high:
            return []
        if high == 0:
            return [c.Array(items=(c.Items(rest=opposite),), seen=seen)]
        if wanted == TOP:
            return [c.Array(low=low, high=high, seen=seen)]
        if low == 0 and high is None:
            return [c.Array(seen=seen)]
        return [c.Array(contains=(c.Contains(wanted, opposite, 0, low, high),), seen=seen)]

    def fails() -> list[c.Case]:
        fewer = counted(0, low - 1) if low else []
        return fewer + (counted(high + 1, None) if high is not None else [])

    return Factor(lambda: counted(low, high), fails)


def close(solver: Solver, case: c.Array, inner: Node) -> c.Array:
    """The case with `unevaluatedItems`: what no other keyword has looked at must meet `inner`."""
    if case.seen.all:
        return case
    rest = must(inner)
    if case.seen.matching:
        options: list[Any] = [o[0][0].schema for o in case.seen.matching if o not in (TOP, NEVER)]
        if len(options) < len(case.seen.matching):
            return replace(case, seen=replace(case.seen, all=True))
        rest = must(solver.document.synthetic(inner, {"anyOf": [*options, inner.schema]}))
    extra = c.Items((TOP,) * case.seen.count, rest)
    return replace(case, items=(*case.items, extra), seen=replace(case.seen, all=True))
