"""Keywords as factors: each schema is the intersection of its keywords' factors, each factor known with its complement.

`cases_of` answers "which values of this type make this schema hold (or fail)?" as a union of cases.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from deepinfer_structured.errors import InvalidSpec, UnsupportedSchema
from deepinfer_structured.schema import cases as c
from deepinfer_structured.schema import keywords_array, keywords_object, keywords_scalar
from deepinfer_structured.schema.document import Node
from deepinfer_structured.schema.factor import Factor, bad_value
from deepinfer_structured.schema.obligation import must
from deepinfer_structured.schema.values import TYPES, dumps, kind

if TYPE_CHECKING:
    from deepinfer_structured.schema.solver import Solver

_BY_TYPE: dict[str, Callable[[Solver, Node], Iterator[Factor]]] = {
    "number": keywords_scalar.number_factors,
    "string": keywords_scalar.string_factors,
    "array": keywords_array.factors,
    "object": keywords_object.factors,
}
_MAX_OVERLAPPING_ANY = 3
_EVERY = (3, 4, 6, 7, 2019, 2020)
_DRAFTS: dict[str, tuple[int, ...]] = {  # keywords that not every draft has
    **dict.fromkeys(("const", "contains", "propertyNames"), (6, 7, 2019, 2020)),
    **dict.fromkeys(("if", "then", "else"), (7, 2019, 2020)),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "minContains", "maxContains"), (2019, 2020)),
    **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems"), (2019, 2020)),
    "dependencies": (3, 4, 6, 7),
    "prefixItems": (2020,),
    "$dynamicRef": (2020,),
    "$recursiveRef": (2019,),
}


def cases_of(solver: Solver, node: Node, type_: str, holds: bool) -> list[c.Case]:
    """The union of cases of one type for which a schema holds, or fails.

    Raises:
        InvalidSpec: a keyword's value is malformed.
        UnsupportedSchema: `holds` is asked and a keyword cannot be enforced.
    """
    schema = node.schema
    if isinstance(schema, bool):
        return [c.ANY[type_]] if schema == holds else []
    found: list[c.Case] = [c.ANY[type_]] if holds else []
    for factor in _factors(solver, node, type_):
        if holds:
            try:
                found = solver.meet(found, factor.holds())
            except UnsupportedSchema as error:
                if solver.options.on_unsupported == "error":
                    raise
                solver.notes[f"not enforced: {error}"] = None
            if not found:
                return []
        else:
            try:
                found = found + [c.unseen(case) for case in factor.fails()]
            except UnsupportedSchema as error:
                solver.drop(error)
    if solver.document.uses_unevaluated:
        return _unevaluated(solver, node, type_, found) if holds else _narrowed(solver, node, type_, found)
    return found


def _factors(solver: Solver, node: Node, type_: str) -> Iterator[Factor]:
    schema, draft = node.schema, node.draft
    if "$ref" in schema and draft <= 7:
        yield _reference(solver, node, "$ref", type_)
        return
    for keyword in ("type", "enum", "const"):  # first: they refute most cases at once
        if keyword in schema and (keyword != "const" or draft >= 6):
            yield _VALUE_FACTORS[keyword](solver, node, type_)
    written = False
    for keyword in schema:
        if draft not in _DRAFTS.get(keyword, _EVERY):
            where = node.pointer or "/"
            solver.notes[f"{keyword!r} at {where} is no keyword of the schema's draft and is an annotation"] = None
        if keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
            if keyword == "$ref" or (keyword == "$dynamicRef") == (draft >= 2020):
                yield _reference(solver, node, keyword, type_)
        elif keyword in _LOGIC:
            yield from _LOGIC[keyword](solver, node, type_)
        elif keyword in ("properties", "required") and type_ == "object" and not written:
            written = True  # here: the order of keywords is the order in which properties are written
            yield from keywords_object.factors(solver, node)
    if type_ in _BY_TYPE and not written:
        yield from _BY_TYPE[type_](solver, node)


def _type(_solver: Solver, node: Node, type_: str) -> Factor:
    names = node.schema["type"]
    names = names if isinstance(names, list) else [names]
    bad = [n for n in names if not isinstance(n, str) or n not in (*TYPES, "integer", "any")]
    if bad:
        known = (*TYPES, "integer")
        close = difflib.get_close_matches(bad[0], known, 1) if isinstance(bad[0], str) else []
        raise InvalidSpec(
            f"schema at {node.pointer or '/'}: unknown type {dumps(bad[0])[:80]}; known: {', '.join(known)}. "
            f"Way out: {f'write {dumps(close[0])}' if close else 'write one of these, or a list of them'}"
        )
    top = [c.ANY[type_]]
    if type_ in names or ("any" in names and node.draft == 3):
        return Factor(lambda: top, list)
    if type_ == "number" and "integer" in names:
        return Factor(lambda: [c.Number(integer=True)], lambda: [c.Number(integer=False)])
    return Factor(list, lambda: top)


def _enum(solver: Solver, node: Node, type_: str) -> Factor:
    values = node.schema["enum"]
    if not isinstance(values, list):
        raise bad_value(node, "enum", "a list")
    return keywords_scalar.one_of_values(solver, [v for v in values if kind(v) == type_], type_, node)


def _const(solver: Solver, node: Node, type_: str) -> Factor:
    value = node.schema["const"]
    return keywords_scalar.one_of_values(solver, [value] if kind(value) == type_ else [], type_, node)


_VALUE_FACTORS: dict[str, Callable[[Solver, Node, str], Factor]] = {"type": _type, "enum": _enum, "const": _const}


def _reference(solver: Solver, node: Node, keyword: str, type_: str) -> Factor:
    def target() -> Node:
        uri = node.schema[keyword]
        if not isinstance(uri, str):
            raise bad_value(node, keyword, "text")
        if keyword == "$ref":
            return solver.document.reference(node, uri)
        if keyword == "$dynamicRef":
            return solver.document.dynamic_reference(node, uri)
        return solver.document.recursive_reference(node)

    return Factor(lambda: solver.of_node(target(), type_, True), lambda: solver.of_node(target(), type_, False))


def _branches(solver: Solver, node: Node, keyword: str) -> list[Node]:
    values = node.schema[keyword]
    if not isinstance(values, list):
        raise bad_value(node, keyword, "a list of schemas")
    return [solver.document.child(node, keyword, i) for i in range(len(values))]


def _all_of(solver: Solver, node: Node, type_: str) -> Iterator[Factor]:
    for branch in _branches(solver, node, "allOf"):
        yield _plain(solver, branch, type_)


def _plain(solver: Solver, branch: Node, type_: str) -> Factor:
    return Factor(lambda: solver.of_node(branch, type_, True), lambda: solver.of_node(branch, type_, False))


def _any_of(solver: Solver, node: Node, type_: str) -> Iterator[Factor]:
    branches = _branches(solver, node, "anyOf")

    def holds() -> list[c.Case]:
        found = [solver.of_node(b, type_, True) for b in branches]
        together: list[c.Case] = []
        if solver.document.uses_unevaluated and len(branches) <= _MAX_OVERLAPPING_ANY:
            # several branches that hold evaluate more properties than one of them
            for i, left in enumerate(found):
                for right in found[i + 1 :]:
                    together += solver.meet(left, right)
            if len(found) == _MAX_OVERLAPPING_ANY:
                together += solver.meet(solver.meet(found[0], found[1]), found[2])
        return solver.simplify([case for cases in found for case in cases] + together)

    yield Factor(holds, lambda: _meet_all(solver, [solver.of_node(b, type_, False) for b in branches], type_))


def _meet_all(solver: Solver, unions: list[list[c.Case]], type_: str) -> list[c.Case]:
    found: list[c.Case] = [c.ANY[type_]]
    for union in sorted(unions, key=len):
        found = solver.meet(found, union)
    return found


def _one_of(solver: Solver, node: Node, type_: str) -> Iterator[Factor]:
    branches = _branches(solver, node, "oneOf")

    def holds() -> list[c.Case]:
        before = solver.losses
        unions = [solver.of_node(b, type_, True) for b in branches]
        complete = solver.losses == before  # only then does "they do not meet" mean that the branches do not
        found: list[c.Case] = []
        for i, own in enumerate(unions):
            others = [b for j, b in enumerate(branches) if j != i and not (complete and _apart(solver, own, unions[j]))]
            for other in others:
                own = solver.meet(own, solver.of_node(other, type_, False))
            found += own
        return found

    def fails() -> list[c.Case]:
        unions = [solver.of_node(b, type_, True) for b in branches]
        found = _meet_all(solver, [solver.of_node(b, type_, False) for b in branches], type_)
        for i, left in enumerate(unions):
            for right in unions[i + 1 :]:
                found = found + solver.meet(left, right)
        return found

    yield Factor(holds, fails)


def _apart(solver: Solver, left: list[c.Case], right: list[c.Case]) -> bool:
    """Whether two unions surely share no value."""
    before = solver.losses
    return all(solver.meet_two(a, b) is None for a in left for b in right) and solver.losses == before


def _not(solver: Solver, node: Node, type_: str) -> Iterator[Factor]:
    inner = solver.document.child(node, "not")
    yield Factor(
        lambda: [c.unseen(case) for case in _complement(solver, inner, type_)],
        lambda: [c.unseen(case) for case in solver.of_node(inner, type_, True)],
    )


def _complement(solver: Solver, inner: Node, type_: str) -> list[c.Case]:
    """The complement of a schema; where parts of it were dropped and nothing is left, the reason is raised."""
    before = len(solver.dropped)
    found = solver.of_node(inner, type_, False)
    if not found and len(solver.dropped) > before:
        raise list(solver.dropped)[-1]
    return found


def _if(solver: Solver, node: Node, type_: str) -> Iterator[Factor]:
    if node.draft < 7 or not ("then" in node.schema or "else" in node.schema or solver.document.uses_unevaluated):
        return
    condition = solver.document.child(node, "if")

    def branch(keyword: str, holds: bool) -> list[c.Case]:
        if keyword not in node.schema:
            return [c.ANY[type_]] if holds else []
        return solver.of_node(solver.document.child(node, keyword), type_, holds)

    def combine(holds: bool) -> list[c.Case]:
        yes = solver.meet(solver.of_node(condition, type_, True), branch("then", holds))
        return yes + solver.meet(_complement(solver, condition, type_), branch("else", holds))

    yield Factor(lambda: combine(True), lambda: combine(False))


_LOGIC: dict[str, Callable[[Solver, Node, str], Iterator[Factor]]] = {
    "allOf": _all_of,
    "anyOf": _any_of,
    "oneOf": _one_of,
    "not": _not,
    "if": _if,
}


def _narrowed(solver: Solver, node: Node, type_: str, found: list[c.Case]) -> list[c.Case]:
    """A complement without the values that fail `unevaluated*` alone: they are left out, and that is said."""
    keyword = {"object": "unevaluatedProperties", "array": "unevaluatedItems"}.get(type_, "")
    if node.draft >= 2019 and node.schema.get(keyword, True) is not True:
        reason = "values that fail it are not expressible where the schema must not hold"
        solver.drop(UnsupportedSchema(node.pointer, keyword, reason, "state what such values are like"))
    return found


def _unevaluated(solver: Solver, node: Node, type_: str, found: list[c.Case]) -> list[c.Case]:
    """Apply `unevaluatedProperties` and `unevaluatedItems` to cases that know what they have evaluated."""
    if node.draft < 2019:
        return found
    if type_ == "object" and "unevaluatedProperties" in node.schema:
        rest = must(solver.document.child(node, "unevaluatedProperties"))
        return solver.meet_each(found, lambda case: keywords_object.close(case, rest))
    if type_ == "array" and "unevaluatedItems" in node.schema:
        inner = solver.document.child(node, "unevaluatedItems")
        return solver.meet_each(found, lambda case: keywords_array.close(solver, case, inner))
    return found
