"""Keywords of numbers and strings, and finite sets of values."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from deepinfer_structured.errors import InvalidSpec, UnsupportedSchema
from deepinfer_structured.regex import Node as Language
from deepinfer_structured.regex import alt, complement, language, literal
from deepinfer_structured.regex.parse import UnsupportedPattern
from deepinfer_structured.schema import cases as c
from deepinfer_structured.schema.document import Node
from deepinfer_structured.schema.factor import Factor, bad_value, count_of
from deepinfer_structured.schema.formats import format_languages
from deepinfer_structured.schema.obligation import NEVER, TOP, Obligation, must
from deepinfer_structured.schema.values import canon, kind

if TYPE_CHECKING:
    from deepinfer_structured.schema.solver import Solver


def one_of_values(solver: Solver, values: list[Any], type_: str, node: Node) -> Factor:
    """One of some values of one type."""
    if not values:
        return Factor(list, lambda: [c.ANY[type_]])
    unique = tuple({canon(v): v for v in values}.values())
    return Factor(lambda: [c.Values(type_, unique)], lambda: _other_values(solver, unique, type_, node))


def _other_values(solver: Solver, values: tuple[Any, ...], type_: str, node: Node) -> list[c.Case]:
    if type_ in ("null", "boolean"):
        all_values = c.ANY[type_]
        assert isinstance(all_values, c.Values)
        left = tuple(v for v in all_values.values if v not in values)
        return [c.Values(type_, left)] if left else []
    if type_ == "number":
        return [c.Number(holes=values)]
    if type_ == "string":
        return [c.String(languages=(complement(alt(*(literal(v) for v in values))),))]
    found: list[c.Case] = [c.ANY[type_]]
    for value in values:
        other = _other_array if type_ == "array" else _other_object
        found = solver.meet(found, other(solver, value, node))
    return found


def _differs(solver: Solver, value: Any, node: Node) -> Obligation:
    return must(solver.document.synthetic(node, {"enum": [value]}), False)


def _other_array(solver: Solver, value: list[Any], node: Node) -> list[c.Case]:
    """Arrays that differ from one: in length, or at a position."""
    found: list[c.Case] = [c.Array(low=len(value) + 1)]
    if value:
        found.append(c.Array(high=len(value) - 1))
    for i, item in enumerate(value):
        found.append(c.Array(items=(c.Items((TOP,) * i + (_differs(solver, item, node),)),), low=i + 1))
    return found


def _other_object(solver: Solver, value: dict[str, Any], node: Node) -> list[c.Case]:
    """Objects that differ from one: a property is missing, has another value, or there is one more."""
    names = alt(*(literal(n) for n in value))
    found: list[c.Case] = [c.Object(exists=((complement(names), TOP),))]
    for name, item in value.items():
        found.append(c.Object((c.Properties(((name, NEVER),)),)))
        found.append(c.Object((c.Properties(((name, _differs(solver, item, node)),)),), (name,)))
    return found


def number_factors(_solver: Solver, node: Node) -> Iterator[Factor]:
    """`minimum`, `maximum`, their exclusive forms, `multipleOf`."""
    schema = node.schema
    for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        value = schema.get(keyword)
        if value is None or (keyword.startswith("ex") and node.draft <= 4):
            continue
        if kind(value) != "number":
            raise bad_value(node, keyword, "a number")
        opposite = "exclusiveM" + keyword.lower().removeprefix("exclusive")[1:]
        is_open = keyword.startswith("ex") or (node.draft <= 4 and schema.get(opposite) is True)
        yield _bound(Decimal(value), "inimum" in keyword, is_open)
    keyword = "multipleOf" if node.draft >= 4 else "divisibleBy"
    if keyword in schema:
        value = schema[keyword]
        if kind(value) != "number" or value <= 0:
            raise bad_value(node, keyword, "a positive number")
        step = Fraction(value)
        yield Factor(lambda: [c.Number(multiple=step)], lambda: [c.Number(non_multiples=(step,))])


def _bound(value: Decimal, lower: bool, is_open: bool) -> Factor:
    above, below = c.Number(low=value, low_open=is_open), c.Number(high=value, high_open=not is_open)
    if lower:
        return Factor(lambda: [above], lambda: [below])
    above, below = c.Number(low=value, low_open=not is_open), c.Number(high=value, high_open=is_open)
    return Factor(lambda: [below], lambda: [above])


def string_factors(solver: Solver, node: Node) -> Iterator[Factor]:
    """`minLength`, `maxLength`, `pattern`, `format`."""
    low, high = count_of(node, "minLength"), count_of(node, "maxLength")
    if low:
        yield Factor(lambda: [c.String(low=low)], lambda: [c.String(high=low - 1)])
    if high is not None:
        yield Factor(lambda: [c.String(high=high)], lambda: [c.String(low=high + 1)])
    if "pattern" in node.schema:
        yield _language_factor(lambda: pattern_language(node, "pattern", node.schema["pattern"]))
    if "format" in node.schema and solver.options.formats:
        yield from _format(solver, node)


def _language_factor(make: Any) -> Factor:
    return Factor(
        lambda: [c.String(languages=(make(),))],
        lambda: [c.String(languages=(complement(make()),))],
    )


def pattern_language(node: Node, keyword: str, pattern: Any) -> Language:
    """The texts in which a pattern is found.

    Raises:
        InvalidSpec: the pattern is malformed.
        UnsupportedSchema: it is not regular.
    """
    if not isinstance(pattern, str):
        raise bad_value(node, keyword, "a regular expression")
    try:
        return language(pattern)
    except UnsupportedPattern as error:
        raise UnsupportedSchema(
            node.pointer, keyword, str(error), "rewrite the pattern without it, or validate it after generation"
        ) from None
    except InvalidSpec as error:
        way_out = "correct the pattern; a backslash before a character stands for the character itself"
        raise InvalidSpec(f"schema at {node.pointer or '/'}: {keyword}: {error}. Way out: {way_out}") from None


def _format(solver: Solver, node: Node) -> Iterator[Factor]:
    name = node.schema["format"]
    if not isinstance(name, str):
        raise bad_value(node, "format", "a name")
    known = format_languages(name)
    if known is None:
        solver.notes[f"format {name!r} at {node.pointer or '/'} is not a JSON Schema format and is an annotation"] = (
            None
        )
        return
    inside, wider = known

    def fails() -> list[c.Case]:
        if wider is None:
            reason, way_out = (
                f"the complement of format {name!r} is not expressible",
                "say by a pattern what is excluded",
            )
            raise UnsupportedSchema(node.pointer, "format", reason, way_out)
        return [c.String(languages=(complement(wider),))]

    yield Factor(lambda: [c.String(languages=(inside,))], fails)
