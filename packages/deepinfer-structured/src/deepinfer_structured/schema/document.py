"""A schema document: dialects, base URIs, anchors and references."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from deepinfer_structured.errors import InvalidSpec, UnsupportedSchema
from deepinfer_structured.schema.values import dumps

_DIALECTS = {
    "draft-03": 3,
    "draft-04": 4,
    "draft-06": 6,
    "draft-07": 7,
    "2019-09": 2019,
    "2020-12": 2020,
}
_LATEST = 2020
_DIALECT = re.compile(r"json-schema\.org/(?:draft/)?(draft-0\d|\d{4}-\d\d)")
_ONE = [
    "additionalItems",
    "additionalProperties",
    "contains",
    "contentSchema",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
]
_MANY = ["allOf", "anyOf", "items", "oneOf", "prefixItems"]
_NAMED = ["$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"]


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A schema at its place. Compared by identity; `Document.node` returns equal schemas as one node where it can.

    Attributes:
        schema: an object or a boolean.
        base: URI of the resource that it belongs to.
        draft: 3, 4, 6, 7, 2019 or 2020.
        pointer: JSON pointer for messages.
        scope: resources entered by references, outermost first; kept only where dynamic references need it.
    """

    schema: Any
    base: str
    draft: int
    pointer: str
    scope: tuple[str, ...] = ()


@dataclass(slots=True)
class _Resource:
    schema: Any
    draft: int
    pointer: str
    anchors: dict[str, tuple[Any, str]] = field(default_factory=dict)
    dynamic: set[str] = field(default_factory=set)


class Document:
    """Finds subschemas and resolves references of one schema document.

    Raises:
        InvalidSpec: the root is neither an object nor a boolean.
    """

    def __init__(self, root: Any) -> None:
        if not isinstance(root, (dict, bool)):
            raise InvalidSpec(f"a JSON schema is an object or a boolean, got {dumps(root)[:80]}")
        self.root_schema = root
        self.resources: dict[str, _Resource] = {}
        self._nodes: dict[tuple[Any, ...], Node] = {}
        self._texts: dict[int, str] = {}
        self._alive: list[Any] = []
        self._dynamic = False
        self.uses_unevaluated = False
        draft = dialect(root, _LATEST)
        base = self._identifier(root, draft, "")
        self.resources[""] = self.resources[base] = _Resource(root, draft, "")
        self._index(root, base, draft, "")
        self.root = self.node(root, base, draft, "", (base,))

    def node(self, schema: Any, base: str, draft: int, pointer: str, scope: tuple[str, ...] = ()) -> Node:
        """The node of a schema; structurally equal schemas of one resource and draft share a node."""
        if not isinstance(schema, (dict, bool)):
            got = f"expected an object or a boolean, got {dumps(schema)[:80]}"
            raise InvalidSpec(
                f"schema at {pointer or '/'}: {got}. Way out: write a schema here, e.g. true for any value"
            )
        scope = scope if self._dynamic else ()
        key = (base, draft, scope, self._text(schema))
        if key not in self._nodes:
            self._alive.append(schema)
            self._nodes[key] = Node(schema, base, draft, pointer, scope)
        return self._nodes[key]

    def _text(self, schema: Any) -> str:
        """The schema's text without what cannot matter, made once an object."""
        if id(schema) not in self._texts:
            self._alive.append(schema)
            if isinstance(schema, dict):
                schema_text = dumps({k: v for k, v in schema.items() if k not in SILENT})
            else:
                schema_text = dumps(schema)
            self._texts[id(schema)] = schema_text
        return self._texts[id(schema)]

    def child(self, parent: Node, *path: str | int) -> Node:
        """The subschema of `parent` at a path of keys and indices."""
        schema, pointer = parent.schema, parent.pointer
        for part in path:
            schema, pointer = schema[part], f"{pointer}/{escape(part)}"
        return self._enter(schema, parent.base, parent.draft, pointer, parent.scope)

    def synthetic(self, parent: Node, schema: Any, note: str = "") -> Node:
        """A schema made up by the compiler, living at its parent's place."""
        return self.node(schema, parent.base, parent.draft, parent.pointer + note, parent.scope)

    def _enter(self, schema: Any, base: str, draft: int, pointer: str, scope: tuple[str, ...]) -> Node:
        if isinstance(schema, dict):
            inner = self._identifier(schema, draft, base)
            if inner != base and inner in self.resources:
                base, draft = inner, self.resources[inner].draft
                scope = (*scope, base) if base not in scope else scope
        return self.node(schema, base, draft, pointer, scope)

    def _identifier(self, schema: Any, draft: int, base: str) -> str:
        if not isinstance(schema, dict):
            return base
        key = "id" if draft <= 4 else "$id"
        value = schema.get(key)
        if not isinstance(value, str) or value.startswith("#") or (draft <= 7 and "$ref" in schema):
            return base
        return urldefrag(urljoin(base, value))[0]

    def _index(self, schema: Any, base: str, draft: int, pointer: str) -> None:
        """Register identifiers and anchors of a schema and its subschemas."""
        stack = [(schema, base, draft, pointer)]
        while stack:
            schema, base, draft, pointer = stack.pop()
            if not isinstance(schema, dict):
                continue
            draft = dialect(schema, draft)
            inner = self._identifier(schema, draft, base)
            if inner != base:
                base = inner
                self.resources.setdefault(base, _Resource(schema, draft, pointer))
            self._index_anchors(schema, self.resources[base], draft, pointer)
            stack += [(s, base, draft, f"{pointer}/{p}") for p, s in subschemas(schema)]

    def _index_anchors(self, schema: dict[str, Any], resource: _Resource, draft: int, pointer: str) -> None:
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(schema.get(key), str):
                resource.anchors.setdefault(schema[key], (schema, pointer))
                if key == "$dynamicAnchor":
                    resource.dynamic.add(schema[key])
        identifier = schema.get("id" if draft <= 4 else "$id")
        if isinstance(identifier, str) and draft <= 7 and "#" in identifier:
            resource.anchors.setdefault(urldefrag(identifier)[1], (schema, pointer))
        if schema.get("$recursiveAnchor") is True:
            resource.dynamic.add("")
        self._dynamic |= "$dynamicRef" in schema or "$recursiveRef" in schema
        self.uses_unevaluated |= "unevaluatedProperties" in schema or "unevaluatedItems" in schema

    def reference(self, node: Node, uri: str, keyword: str = "$ref") -> Node:
        """The node that a static reference points to.

        Raises:
            UnsupportedSchema: the target is outside the document or missing.
        """
        target, fragment = urldefrag(urljoin(node.base, uri))
        resource = self.resources.get(target)
        if resource is None and uri.startswith("#"):
            target, resource = node.base, self.resources.get(node.base) or self.resources[""]
        if resource is None:
            raise UnsupportedSchema(
                node.pointer, keyword, f"{uri!r} is outside the document", "copy the schema it points to into $defs"
            )
        scope = node.scope if target in node.scope else (*node.scope, target)
        found = self._fragment(resource, target, unquote(fragment), scope)
        if found is None and target != "" and fragment.startswith("/"):
            found = self._fragment(self.resources[""], "", unquote(fragment), scope)
        if found is None:
            raise UnsupportedSchema(node.pointer, keyword, f"{uri!r} points nowhere", "correct the reference")
        return found

    def _fragment(self, resource: _Resource, base: str, fragment: str, scope: tuple[str, ...]) -> Node | None:
        if fragment and not fragment.startswith("/"):
            if fragment not in resource.anchors:
                return None
            schema, pointer = resource.anchors[fragment]
            return self.node(schema, base, resource.draft, pointer, scope)
        schema, draft, pointer = resource.schema, resource.draft, resource.pointer
        for raw in fragment.split("/")[1:]:
            part = raw.replace("~1", "/").replace("~0", "~")
            if isinstance(schema, dict) and part in schema:
                schema = schema[part]
            elif isinstance(schema, list) and part.isascii() and part.isdigit() and int(part) < len(schema):
                schema = schema[int(part)]
            else:
                return None
            pointer = f"{pointer}/{raw}"
            inner = self._identifier(schema, draft, base)
            if inner != base and inner in self.resources:
                base, draft = inner, self.resources[inner].draft
        if not isinstance(schema, (dict, bool)):
            return None
        return self.node(schema, base, draft, pointer, scope)

    def dynamic_reference(self, node: Node, uri: str) -> Node:
        """The target of `$dynamicRef` (2020-12): the outermost entered resource that has the anchor."""
        start = self.reference(node, uri, "$dynamicRef")
        name = urldefrag(uri)[1]
        if not isinstance(start.schema, dict) or start.schema.get("$dynamicAnchor") != name:
            return start
        for base in node.scope:
            if name in self.resources[base].dynamic:
                return self.reference(node, f"{base}#{name}", "$dynamicRef")
        return start

    def recursive_reference(self, node: Node) -> Node:
        """The target of `$recursiveRef: "#"` (2019-09)."""
        if "" in self.resources[node.base].dynamic:
            for base in node.scope:
                if "" in self.resources[base].dynamic:
                    return self.reference(node, f"{base}#", "$recursiveRef")
        return self.reference(node, "#", "$recursiveRef")


SILENT = {"title", "description", "examples", "example", "$comment", "default", "readOnly", "writeOnly", "deprecated"}


def dialect(schema: Any, inherited: int) -> int:
    """The draft that a schema declares, else the inherited one. Unknown dialects count as the latest draft."""
    uri = schema.get("$schema") if isinstance(schema, dict) else None
    if not isinstance(uri, str):
        return inherited
    found = _DIALECT.search(uri)
    return _DIALECTS.get(found.group(1), _LATEST) if found else _LATEST


def is_known_dialect(uri: str) -> bool:
    """Whether a `$schema` names a draft."""
    found = _DIALECT.search(uri)
    return (found is not None and found.group(1) in _DIALECTS) or uri.rstrip("#").endswith("json-schema.org/schema")


def subschemas(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every subschema in a known position, with its relative pointer."""
    for key in _ONE:
        if isinstance(schema.get(key), dict):
            yield key, schema[key]
    for key in _MANY:
        if isinstance(schema.get(key), list):
            yield from ((f"{key}/{i}", s) for i, s in enumerate(schema[key]))
    for key in _NAMED:
        if isinstance(schema.get(key), dict):
            yield from ((f"{key}/{escape(n)}", s) for n, s in schema[key].items())


def every_schema(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """A schema and all inside it in known positions, with their pointers: first ones first."""
    stack = [("", schema)]
    while stack:
        pointer, inner = stack.pop()
        if isinstance(inner, dict):
            yield pointer, inner
            stack += reversed([(f"{pointer}/{path}", sub) for path, sub in subschemas(inner)])


def escape(part: str | int) -> str:
    """One segment of a JSON pointer."""
    return str(part).replace("~", "~0").replace("/", "~1")
