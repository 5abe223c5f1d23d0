"""What is said of a schema before it is lowered: keywords that are none, a dialect that is unknown, half characters."""

from __future__ import annotations

import difflib
import re
from typing import Any

from deepinfer_structured.errors import UnsupportedSchema
from deepinfer_structured.schema.document import SILENT, every_schema, is_known_dialect

_HALF = re.compile("[\ud800-\udfff]")
_MOST_NAMED = 5
_WORDS = (
    "$schema $id id $ref $anchor $dynamicRef $dynamicAnchor $recursiveRef $recursiveAnchor $vocabulary $defs "
    "definitions type enum const allOf anyOf oneOf not if then else properties patternProperties "
    "additionalProperties required minProperties maxProperties propertyNames dependencies dependentRequired "
    "dependentSchemas unevaluatedProperties items prefixItems additionalItems minItems maxItems uniqueItems "
    "contains minContains maxContains unevaluatedItems minLength maxLength pattern format contentEncoding "
    "contentMediaType contentSchema minimum maximum exclusiveMinimum exclusiveMaximum multipleOf divisibleBy"
)
_KEYWORDS = frozenset(_WORDS.split())


def remarks(schema: Any) -> list[str]:
    """Notes on a `$schema` that is no known draft, and on keywords that no draft has, one note for all of them."""
    found = []
    uri = schema.get("$schema") if isinstance(schema, dict) else None
    if isinstance(uri, str) and not is_known_dialect(uri):
        found.append(f"$schema {uri[:200]!r} is no draft that is known here; the schema is read as draft 2020-12")
    unknown: dict[str, str] = {}
    for pointer, inner in every_schema(schema):
        for keyword in inner:
            if keyword not in _KEYWORDS and keyword not in SILENT and not keyword.startswith("x-"):
                unknown.setdefault(keyword, pointer or "/")
    if unknown:
        named = [_named(keyword, pointer) for keyword, pointer in list(unknown.items())[:_MOST_NAMED]]
        more = f" and {len(unknown) - len(named)} more" if len(unknown) > len(named) else ""
        found.append(f"unknown keywords are annotations: {', '.join(named)}{more}")
    return found


def _named(keyword: str, pointer: str) -> str:
    close = difflib.get_close_matches(keyword, _KEYWORDS, 1, 0.8)
    return f"{keyword[:80]!r} at {pointer}" + (f" (did you mean {close[0]!r}?)" if close else "")


def check_characters(schema: Any) -> None:
    """Raises UnsupportedSchema for text with half a character, a lone surrogate, where it would have to be generated."""
    for pointer, inner in every_schema(schema):
        for keyword, value in inner.items():
            if keyword in ("enum", "const", "required", "properties", "patternProperties") and (
                half := _half(value, keyword in ("enum", "const"))
            ):
                reason = f"it holds half a character, the lone surrogate U+{ord(half):04X}, which no text in UTF-8 has"
                raise UnsupportedSchema(pointer, keyword, reason, "write the whole character, or drop the value")


def _half(value: Any, deep: bool) -> str:
    """The first lone surrogate of the texts in a value; of the keys alone where the rest is schemas."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            if found := _HALF.search(item):
                return found.group()
        elif isinstance(item, dict):
            stack += [*item, *(item.values() if deep else ())]
        elif isinstance(item, list):
            stack += item
    return ""
