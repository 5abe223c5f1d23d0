"""Which arrays of a document must hold distinct items, found by walking the schema along the path in the document.

The walk follows every subschema that could apply at a path, whatever its branch. So an array may be held to distinct
items although only another branch asks for it: fewer texts are accepted, never a wrong one.
"""

from __future__ import annotations

from typing import TypeAlias

from deepinfer_structured.errors import StructuredError
from deepinfer_structured.regex import language, matches
from deepinfer_structured.schema.document import Document, Node
from deepinfer_structured.schema.values import load

Place: TypeAlias = frozenset[Node]
_LISTS = ("allOf", "anyOf", "oneOf")
_SINGLE = ("not", "if", "then", "else")
_MAPS = ("dependentSchemas", "dependencies")


class UniquePaths:
    """The places of one schema. A place is the set of subschemas that may apply at a path."""

    def __init__(self, schema_text: str) -> None:
        self._document = Document(load(schema_text))
        self._closures: dict[Place, Place] = {}
        self._steps: dict[tuple[Place, str | int], Place] = {}
        self.root: Place = frozenset({self._document.root})

    def unique(self, place: Place) -> bool:
        """Whether an array at the place is held to distinct items."""
        return any(isinstance(n.schema, dict) and n.schema.get("uniqueItems") is True for n in self._closure(place))

    def step(self, place: Place, part: str | int) -> Place:
        """The place of a property (by name) or an item (by index)."""
        if isinstance(part, int):
            part = min(part, 64)  # tuples are shorter; all further items are alike
        key = (place, part)
        if key not in self._steps:
            find = self._item if isinstance(part, int) else self._property
            found = [n for node in self._closure(place) if isinstance(node.schema, dict) for n in find(node, part)]
            self._steps[key] = frozenset(found)
        return self._steps[key]

    def _closure(self, place: Place) -> Place:
        if place not in self._closures:
            found: set[Node] = set()
            stack = list(place)
            while stack:
                node = stack.pop()
                if node not in found:
                    found.add(node)
                    stack += self._in_place(node)
            self._closures[place] = frozenset(found)
        return self._closures[place]

    def _in_place(self, node: Node) -> list[Node]:
        schema, document = node.schema, self._document
        if not isinstance(schema, dict):
            return []
        found = [
            document.child(node, k, i) for k in _LISTS if isinstance(schema.get(k), list) for i in range(len(schema[k]))
        ]
        found += [document.child(node, k) for k in _SINGLE if isinstance(schema.get(k), (dict, bool))]
        for keyword in _MAPS:
            if isinstance(schema.get(keyword), dict):
                named = schema[keyword].items()
                found += [document.child(node, keyword, n) for n, s in named if isinstance(s, (dict, bool))]
        for keyword, resolve in (
            ("$ref", document.reference),
            ("$dynamicRef", document.dynamic_reference),
            ("$recursiveRef", lambda n, _: document.recursive_reference(n)),
        ):
            if isinstance(schema.get(keyword), str):
                try:
                    found.append(resolve(node, schema[keyword]))
                except StructuredError:
                    continue
        return found

    def _property(self, node: Node, name: str | int) -> list[Node]:
        schema, document = node.schema, self._document
        found = []
        if name in schema.get("properties", ()):
            found.append(document.child(node, "properties", name))
        for pattern in schema.get("patternProperties", ()):
            if _may_match(pattern, str(name)):
                found.append(document.child(node, "patternProperties", pattern))
        for keyword in ("additionalProperties", "unevaluatedProperties"):
            if keyword in schema and not found:
                found.append(document.child(node, keyword))
        return found

    def _item(self, node: Node, index: str | int) -> list[Node]:
        schema, document = node.schema, self._document
        assert isinstance(index, int)
        found = []
        for keyword in ("prefixItems", "items"):
            if isinstance(schema.get(keyword), list) and index < len(schema[keyword]):
                found.append(document.child(node, keyword, index))
        for keyword in ("items", "additionalItems", "contains", "unevaluatedItems"):
            if isinstance(schema.get(keyword), (dict, bool)):
                found.append(document.child(node, keyword))
        return found


def _may_match(pattern: str, name: str) -> bool:
    try:
        return matches(language(pattern), name)
    except StructuredError:
        return True
