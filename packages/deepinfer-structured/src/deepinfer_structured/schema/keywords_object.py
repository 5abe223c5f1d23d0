"""Keywords of objects."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from deepinfer_structured.regex import Node as Language
from deepinfer_structured.regex import alt, complement, literal
from deepinfer_structured.schema import cases as c
from deepinfer_structured.schema.document import Node
from deepinfer_structured.schema.factor import Factor, bad_value, count_of
from deepinfer_structured.schema.keywords_scalar import pattern_language
from deepinfer_structured.schema.obligation import NEVER, TOP, Obligation, must

if TYPE_CHECKING:
    from deepinfer_structured.schema.solver import Solver


def factors(solver: Solver, node: Node) -> Iterator[Factor]:
    """`properties` and its companions, `required`, the counts, `propertyNames`, the dependencies."""
    schema = node.schema
    for keyword in ("properties", "patternProperties"):
        if keyword in schema and not isinstance(schema[keyword], dict):
            raise bad_value(node, keyword, "an object")
    if schema.keys() & {"properties", "patternProperties", "additionalProperties"}:
        yield _properties(solver, node)
    required = _required(node)
    if required:
        yield Factor(lambda: [c.Object(required=required)], lambda: [_absent(n) for n in required])
    low, high = count_of(node, "minProperties"), count_of(node, "maxProperties")
    if low:
        yield Factor(lambda: [c.Object(low=low)], lambda: [c.Object(high=low - 1)])
    if high is not None:
        yield Factor(lambda: [c.Object(high=high)], lambda: [c.Object(low=high + 1)])
    if "propertyNames" in schema and node.draft >= 6:
        yield _property_names(solver, node)
    yield from _dependencies(solver, node)


def _absent(name: str) -> c.Object:
    return c.Object(properties=(c.Properties(names=((name, NEVER),)),))


def _required(node: Node) -> tuple[str, ...]:
    if node.draft == 3:
        named = node.schema.get("properties", {})
        return tuple(n for n, s in named.items() if isinstance(s, dict) and s.get("required") is True)
    if "required" not in node.schema:
        return ()
    names = node.schema["required"]
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise bad_value(node, "required", "a list of names")
    return tuple(dict.fromkeys(names))


def _properties(solver: Solver, node: Node) -> Factor:
    schema, document = node.schema, solver.document
    names = {n: document.child(node, "properties", n) for n in schema.get("properties", ())}
    patterns = {p: document.child(node, "patternProperties", p) for p in schema.get("patternProperties", ())}
    rest = document.child(node, "additionalProperties") if "additionalProperties" in schema else None

    def languages() -> dict[str, Language]:
        return {p: pattern_language(node, "patternProperties", p) for p in patterns}

    def holds() -> list[c.Case]:
        found = languages()
        group = c.Properties(
            tuple((n, must(s)) for n, s in names.items()),
            tuple((found[p], must(s)) for p, s in patterns.items()),
            must(rest) if rest else TOP,
        )
        return [c.Object((group,), seen=c.SeenProperties(tuple(names), tuple(found.values()), rest is not None))]

    def fails() -> list[c.Case]:
        out = [c.Object((c.Properties(((n, wrong),)),), (n,)) for n, s in names.items() if (wrong := _not(s)) != NEVER]
        found = languages()
        for pattern, inner in patterns.items():
            if (wrong := _not(inner)) != NEVER:
                out.append(c.Object(exists=((found[pattern], wrong),)))
        if rest is not None and (wrong := _not(rest)) != NEVER:
            taken = alt(*found.values(), *(literal(n) for n in names))
            out.append(c.Object(exists=((complement(taken), wrong),)))
        return list(out)

    return Factor(holds, fails)


def _not(node: Node) -> Obligation:
    return must(node, False)


def _property_names(solver: Solver, node: Node) -> Factor:
    inner = solver.document.child(node, "propertyNames")

    def fails() -> list[c.Case]:
        return [c.Object(exists=((solver.text_language(must(inner, False)), TOP),))]

    return Factor(lambda: [c.Object(keys=(solver.text_language(must(inner)),))], fails)


def _dependencies(solver: Solver, node: Node) -> Iterator[Factor]:
    keywords = ("dependencies",) if node.draft <= 7 else ("dependentRequired", "dependentSchemas")
    for keyword in keywords:
        if keyword not in node.schema:
            continue
        if not isinstance(node.schema[keyword], dict):
            raise bad_value(node, keyword, "an object")
        for name, needed in node.schema[keyword].items():
            yield _dependency(solver, node, keyword, name, needed)


def _dependency(solver: Solver, node: Node, keyword: str, name: str, needed: Any) -> Factor:
    needed = [needed] if isinstance(needed, str) and node.draft == 3 else needed
    if isinstance(needed, list):
        if not all(isinstance(n, str) for n in needed):
            raise bad_value(node, keyword, "lists of names or schemas")
        names = tuple(dict.fromkeys([name, *needed]))
        together = c.Object(required=names)
        missing = [replace(_absent(n), required=(name,)) for n in names if n != name]
        if names == (name,):
            return Factor(lambda: [c.ANY["object"]], list)
        return Factor(lambda: [_absent(name), together], lambda: list(missing))
    inner = solver.document.child(node, keyword, name)
    present: list[c.Case] = [c.Object(required=(name,))]
    return Factor(
        lambda: [_absent(name), *solver.meet(present, solver.of_node(inner, "object", True))],
        lambda: solver.meet(present, solver.of_node(inner, "object", False)),
    )


def close(case: c.Object, rest: Obligation) -> c.Object:
    """The case with `unevaluatedProperties`: what no other keyword has looked at must meet `rest`."""
    if case.seen.all:
        return case
    group = c.Properties(tuple((n, TOP) for n in case.seen.names), tuple((p, TOP) for p in case.seen.patterns), rest)
    return replace(case, properties=(*case.properties, group), seen=c.SeenProperties(all=True))
