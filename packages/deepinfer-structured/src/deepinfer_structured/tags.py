"""Structural tags: free text with tagged parts whose content follows a schema, as tool calls need it.

Two notations are read: `{"structures": [{begin, schema, end}], "triggers": [...]}`, and the nested one of
`{"format": {"type": "triggered_tags" | "tag" | "sequence" | "or" | "const_string" | "any_text" | "json_schema" | ...}}`.
"""

from __future__ import annotations

import json
from typing import Any

from deepinfer_structured.config import Options
from deepinfer_structured.errors import InvalidSpec, UnsupportedSchema
from deepinfer_structured.regex import quote
from deepinfer_structured.regex.search import whole
from deepinfer_structured.schema.lower import lower

_TEXT = r"/(.|\n)*/"


class _Builder:
    """Collects the rules of the outer grammar and the grammars that it refers to."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.lines: list[str] = []
        self.grammars: list[dict[str, str]] = []
        self.notes: list[str] = []

    def rule(self, body: str, attributes: str = "") -> str:
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}{attributes}: {body}")
        return name

    def schema(self, schema: Any) -> str:
        found = lower(json.dumps(schema, ensure_ascii=False), self.options)
        if found.guarded:
            raise UnsupportedSchema(
                "", "uniqueItems", "items of many values cannot be kept distinct inside a tag", "drop it"
            )
        if found.distinct_keys:
            reason = "keys that the schema does not list cannot be kept distinct inside a tag"
            raise UnsupportedSchema("", "minProperties", reason, "list the properties")
        self.notes += found.notes
        name = f"s{len(self.grammars)}"
        self.grammars.append({"name": name, "lark_grammar": found.lark})
        return f"@{name}"

    def expression(self, value: Any) -> str:
        """The Lark expression of one format object."""
        kind = value.get("type") if isinstance(value, dict) else None
        match kind:
            case "const_string":
                return _literal(_field(value, "value", str))
            case "json_schema":
                return self.schema(_field(value, "json_schema", (dict, bool)))
            case "regex":
                language = quote.terminal(whole(_field(value, "pattern", str)), raw=True)
                self.lines.append(f"T{len(self.lines)}: {language}")
                return f"T{len(self.lines) - 1}"
            case "any_text":
                return "TEXT"
            case "sequence":
                return " ".join(self.expression(v) for v in _field(value, "elements", list)) or '""'
            case "or":
                return f"({' | '.join(self.expression(v) for v in _field(value, 'elements', list))})"
            case "tag":
                return self.tag(value)
            case "triggered_tags":
                return self.triggered(value)
            case "tags_with_separator":
                return self.separated(value)
        raise InvalidSpec(f"structural tag: unknown format type {kind!r}")

    def tag(self, value: dict[str, Any], skip: str = "") -> str:
        """One tag; `skip` is what a trigger has matched of its begin already."""
        begin = _field(value, "begin", str)
        ends = value.get("end", "")
        ends = ends if isinstance(ends, list) else [ends]
        if not ends or not all(isinstance(e, str) for e in ends):
            raise InvalidSpec(
                f"structural tag {begin!r}: end must be text or a list of texts, got {value.get('end')!r}"
            )
        content = value.get("content")
        rest = _literal(begin[len(skip) :])
        if isinstance(content, dict) and content.get("type") == "any_text":
            closing = " | ".join(_literal(e) for e in ends)
            return f"{rest} {self.rule(f'TEXT ({closing})', '[lazy]')}"
        inner = self.schema(value["schema"]) if content is None and "schema" in value else self.expression(content)
        return f"{rest} {inner} ({' | '.join(_literal(e) for e in ends)})"

    def triggered(self, value: dict[str, Any]) -> str:
        tags = value.get("tags", value.get("structures"))
        triggers = _field(value, "triggers", list)
        if not isinstance(tags, list) or not tags or not triggers:
            raise InvalidSpec("structural tag: triggers and tags must not be empty")
        wrong = [t for t in triggers if not isinstance(t, str) or not t] + [t for t in tags if not isinstance(t, dict)]
        if wrong:
            raise InvalidSpec(f"structural tag: triggers are texts and tags are objects, got {wrong[0]!r}")
        options: list[str] = []
        for trigger in triggers:
            own = [t for t in tags if isinstance(t, dict) and str(t.get("begin", "")).startswith(trigger)]
            if not own:
                continue
            head = self.rule(f"TEXT {_literal(trigger)}", "[lazy]")
            options.append(f"{head} ({' | '.join(self.tag(t, trigger) for t in own)})")
        if not options:
            begins = [t.get("begin") for t in tags]
            raise InvalidSpec(
                f"structural tag: no tag begins with a trigger of {triggers}; the tags begin with {begins}"
            )
        loop = self.rule(" | ".join(options))
        if value.get("stop_after_first"):
            return loop if value.get("at_least_one") else f"({loop} | TEXT)"
        return f"{loop}{'+' if value.get('at_least_one') else '*'} TEXT"

    def separated(self, value: dict[str, Any]) -> str:
        one = self.rule(" | ".join(self.tag(t) for t in _field(value, "tags", list)))
        some = f"{one} ({_literal(_field(value, 'separator', str))} {one})*"
        return some if value.get("at_least_one") else f"({some})?"


def _field(value: dict[str, Any], name: str, kind: Any) -> Any:
    if not isinstance(value.get(name), kind):
        raise InvalidSpec(f"structural tag: {value.get('type', 'tag')} needs {name!r}")
    return value[name]


def _literal(text: str) -> str:
    return quote.lark_string(text) if text else '""'


def lower_tags(content: str, options: Options) -> tuple[str, tuple[str, ...]]:
    """The grammar of structural tags, and remarks.

    Raises:
        InvalidSpec: the notation is malformed.
        StructuredError: a schema in it cannot be enforced.
    """
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InvalidSpec(f"structural tags must be JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidSpec("structural tags must be a JSON object")
    builder = _Builder(options)
    if "format" in value:
        start = builder.expression(value["format"])
    else:
        start = builder.triggered(value)
    lines = [*builder.lines, f"start: {start}", f"TEXT: {_TEXT}", quote.definitions(raw=True)]
    top = {"lark_grammar": "%llguidance {}\n" + "\n".join(lines)}
    return json.dumps({"grammars": [top, *builder.grammars]}), tuple(builder.notes)
