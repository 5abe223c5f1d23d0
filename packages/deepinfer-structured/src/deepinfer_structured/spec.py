"""What the user asks for: one frozen value that names a kind of constraint and its content."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from deepinfer_structured.errors import InvalidSpec

_HALF = re.compile("[\ud800-\udfff]")
Kind = Literal["json_schema", "json_object", "regex", "grammar", "choice", "structural_tag"]


@dataclass(frozen=True, slots=True)
class Spec:
    """A constraint on generated text. `content` is text, so that a spec can be hashed, stored and sent.

    Attributes:
        kind: what `content` is.
        content: a JSON schema, a regex, a grammar (EBNF or Lark), a JSON list of choices, or structural tags as JSON.
    """

    kind: Kind
    content: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise InvalidSpec(f"constraint kind must be one of {get_args(Kind)}, got {self.kind!r}")
        if not isinstance(self.content, str):
            raise InvalidSpec(f"{self.kind} content must be text, got {type(self.content).__name__}")
        if self.kind not in ("json_schema", "regex") and (half := _HALF.search(self.content)):
            reason = f"the lone surrogate U+{ord(half.group()):04X} at {half.start()}, which no text in UTF-8 has"
            raise InvalidSpec(f"the {self.kind} holds half a character, {reason}. Way out: write the whole character")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> Spec:
        """A JSON schema, as an object or as its JSON text. Key order is kept: it is the order of properties."""
        return cls("json_schema", _as_json(schema, "JSON schema"))

    @classmethod
    def json_object(cls) -> Spec:
        """Any JSON object."""
        return cls("json_object")

    @classmethod
    def regex(cls, pattern: str) -> Spec:
        """Text that the pattern (ECMAScript syntax) matches as a whole."""
        return cls("regex", pattern)

    @classmethod
    def grammar(cls, text: str) -> Spec:
        """A context-free grammar, Lark (`start: ...`) or EBNF / GBNF (`root ::= ...`)."""
        return cls("grammar", text)

    @classmethod
    def choice(cls, options: Sequence[str]) -> Spec:
        """One of the given texts."""
        if not options or not all(isinstance(o, str) for o in options):
            raise InvalidSpec(f"choice needs a list of at least one text, got {options!r}")
        return cls("choice", json.dumps(list(options), ensure_ascii=False))

    @classmethod
    def structural_tag(cls, tags: Mapping[str, Any] | str) -> Spec:
        """Free text with tagged parts: `{"structures": [{begin, schema, end}], "triggers": [...]}`."""
        return cls("structural_tag", _as_json(tags, "structural tag"))

    @classmethod
    def from_response_format(cls, value: Mapping[str, Any] | None) -> Spec | None:
        """The OpenAI `response_format` field; None for absent or `{"type": "text"}`.

        Raises:
            InvalidSpec: an unknown type or a missing schema.
        """
        if value is None:
            return None
        kind = value.get("type") if isinstance(value, Mapping) else None
        if kind == "text":
            return None
        if kind == "json_object":
            return cls.json_object()
        if kind == "json_schema":
            return cls._from_named_schema(value.get("json_schema"))
        if kind == "structural_tag":
            return cls.structural_tag({k: v for k, v in value.items() if k != "type"})
        known = "text, json_object, json_schema or structural_tag"
        raise InvalidSpec(f"response_format.type must be {known}, got {kind!r}")

    @classmethod
    def _from_named_schema(cls, named: Any) -> Spec:
        schema = named.get("schema") if isinstance(named, Mapping) else None
        if schema is None:
            raise InvalidSpec("response_format.json_schema.schema is missing")
        return cls.json_schema(schema)

    @classmethod
    def from_structured_outputs(cls, value: Mapping[str, Any] | None) -> Spec | None:
        """vLLM's `structured_outputs` field: exactly one of json, json_object, regex, choice, grammar, structural_tag.

        Raises:
            InvalidSpec: none or several of them.
        """
        if value is None:
            return None
        makers: dict[str, Any] = {
            "json": cls.json_schema,
            "json_object": lambda _: cls.json_object(),
            "regex": cls.regex,
            "choice": cls.choice,
            "grammar": cls.grammar,
            "structural_tag": cls.structural_tag,
        }
        chosen = [name for name in makers if value.get(name) not in (None, False)]
        if len(chosen) != 1:
            raise InvalidSpec(f"structured_outputs needs exactly one of {sorted(makers)}, got {chosen}")
        return makers[chosen[0]](value[chosen[0]])


def _as_json(value: Any, what: str) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidSpec(f"the {what} cannot be written as JSON: {error}") from None
