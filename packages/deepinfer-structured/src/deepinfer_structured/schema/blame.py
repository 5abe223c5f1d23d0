"""Which keyword to name when a schema is too much, or when nothing fits it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from deepinfer_structured.schema.document import Node, escape, every_schema, subschemas

FEWER = "list fewer alternatives here, tell them apart by a required property with a `const`, or split the schema"
SHORTER = "simplify or drop the pattern, or bound the text with maxLength alone, or split the schema"
SMALLER = "list fewer properties, lower the counts (maxItems, minProperties), or split the schema"
ROUNDER = "give multipleOf fewer digits, or validate it after generation"
SATISFIABLE = "relax it: together with the other keywords it leaves no value"

# Those whose lowering multiplies come first.
_COMBINING = ("oneOf", "anyOf", "allOf", "if", "not", "dependentSchemas", "dependencies", "unevaluatedProperties",
              "unevaluatedItems", "contains", "patternProperties", "propertyNames", "minProperties", "maxProperties",
              "properties", "prefixItems", "items", "additionalProperties", "additionalItems", "$ref", "$dynamicRef",
              "$recursiveRef", "enum", "const", "pattern", "format", "multipleOf", "maxLength", "minLength", "maxItems",
              "minItems", "uniqueItems", "required", "type")  # fmt: skip
_TEXTUAL = (
    "pattern",
    "not",
    "format",
    "enum",
    "patternProperties",
    "propertyNames",
    "maxLength",
    "minLength",
    "multipleOf",
)

_WEAK = ("type", "required")

Place = tuple[str, str]
"""JSON pointer and keyword."""


def of_path(path: Sequence[Node]) -> Place:
    """The innermost schema being worked on that combines others, and the keyword that does."""
    for wanted in (_COMBINING[:13], _COMBINING):
        for node in reversed(path):
            if isinstance(node.schema, dict) and (found := _first(node.schema, wanted)):
                return node.pointer, found
    return "", "type"


def of_nodes(nodes: Sequence[Node], *, textual: bool = False) -> Place:
    """The keyword to blame for the size of what a few schemas together were lowered to.

    Args:
        nodes: the schemas.
        textual: whether a terminal is too much (patterns and their like), not the number of rules.
    """
    order = (*_TEXTUAL, *_COMBINING) if textual else _COMBINING
    schemas = [n for n in nodes if isinstance(n.schema, dict)]
    found = [(order.index(k), i, k) for i, n in enumerate(schemas) if (k := _first(n.schema, order))]
    if not found:
        return "", "type"
    _, index, keyword = min(found)
    return schemas[index].pointer, keyword


def of_keyword(schema: Any, keyword: str) -> Place:
    """The first place with a keyword."""
    return next(((pointer, keyword) for pointer, inner in every_schema(schema) if keyword in inner), ("", keyword))


def of_text(schema: Any) -> Place:
    """The keyword of the whole schema with the most alternatives: for when nothing else is known."""
    for order in (_COMBINING[:11], _COMBINING):
        best, found = 0, ("", "type")
        for pointer, inner in every_schema(schema):
            for weight, keyword in enumerate(reversed(order)):
                value = inner.get(keyword)
                count = len(value) if isinstance(value, (list, dict)) else 0
                if count * (weight + 1) > best:
                    best, found = count * (weight + 1), (pointer, keyword)
        if best:
            return found
    return "", next(iter(schema), "type") if isinstance(schema, dict) else "type"


def of_contradiction(schema: Any, fits: Callable[[Any], bool], most: int = 64) -> Place:
    """The innermost keyword without which something fits the schema.

    Args:
        schema: nothing fits it.
        fits: whether a changed schema has values; False if it cannot be told.
        most: changed schemas to try.
    """
    tries = iter(range(most))

    def search(inner: Any, rebuild: Callable[[Any], Any], pointer: str) -> Place | None:
        if not isinstance(inner, dict):
            return None
        keywords: list[str] = sorted(inner, key=lambda k: k in _WEAK)  # what asks for anything at all is blamed last
        for keyword in keywords:
            without = {k: v for k, v in inner.items() if k != keyword}
            if next(tries, None) is None:
                return None
            if not fits(rebuild(without)):
                continue
            for path, sub in subschemas({keyword: inner[keyword]}):
                part = path.partition("/")[2]

                def deeper(new: Any, keyword: str = keyword, part: str = part, inner: Any = inner) -> Any:
                    return rebuild({**inner, keyword: _replaced(inner[keyword], part, new)})

                if next(tries, None) is not None and fits(deeper({})):
                    return search(sub, deeper, f"{pointer}/{path}") or (pointer, keyword)
            return pointer, keyword
        return None

    return search(schema, lambda new: new, "") or of_text(schema)


def _replaced(value: Any, part: str, new: Any) -> Any:
    """A keyword's value with one of its subschemas replaced; `part` is its key, its index, or "" for the value itself."""
    if not part:
        return new
    if isinstance(value, list):
        return [new if str(i) == part else v for i, v in enumerate(value)]
    return {k: new if escape(k) == part else v for k, v in value.items()}


def _first(schema: dict[str, Any], order: Sequence[str]) -> str:
    return next((k for k in order if k in schema), "")
