"""Every kind of specification to grammar text that needs no vocabulary yet."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from deepinfer_structured import tags
from deepinfer_structured.config import Options
from deepinfer_structured.engines import llguidance
from deepinfer_structured.errors import InvalidSpec, LimitExceeded
from deepinfer_structured.regex import NEVER, quote
from deepinfer_structured.regex.parse import UnsupportedPattern
from deepinfer_structured.regex.search import whole
from deepinfer_structured.schema import blame
from deepinfer_structured.schema.lower import lower
from deepinfer_structured.spec import Spec


@dataclass(frozen=True, slots=True)
class Lowered:
    """Grammar text for one engine, and remarks for the user.

    Attributes:
        engine: "llguidance"; the text is in its Lark dialect.
        text: what the engine compiles.
        notes: remarks, e.g. a `format` that is only an annotation.
        unique: text of the schema whose `uniqueItems` a guard must enforce, or "".
        distinct_keys: whether a guard must keep the keys of each object distinct.
        max_whitespace: longest run of whitespace outside strings if the matcher must enforce it, None if the grammar does.
        most_rules, longest_terminals: the keywords (pointer, keyword) that the largest parts of the grammar come from.
    """

    engine: str
    text: str
    notes: tuple[str, ...] = ()
    unique: str = ""
    distinct_keys: bool = False
    max_whitespace: int | None = None
    most_rules: blame.Place = ("", "")
    longest_terminals: blame.Place = ("", "")


def lower_spec(spec: Spec, options: Options) -> Lowered:
    """Lower a specification for llguidance.

    Raises:
        StructuredError: see `compile_spec`.
    """
    if len(spec.content) > options.limits.max_bytes:
        raise LimitExceeded(f"the {spec.kind} has {len(spec.content)} bytes, the limit is {options.limits.max_bytes}")
    match spec.kind:
        case "json_schema" | "json_object":
            content = spec.content if spec.kind == "json_schema" else '{"type": "object"}'
            found = lower(content, options, count_whitespace=False)
            unique = spec.content if found.guarded else ""
            places = found.most_rules, found.longest_terminals
            bound = options.max_whitespace or None
            return Lowered("llguidance", found.lark, found.notes, unique, found.distinct_keys, bound, *places)
        case "regex":
            return Lowered("llguidance", _regex(spec.content))
        case "choice":
            return Lowered("llguidance", f"start: {' | '.join(quote.lark_string(o) for o in _choices(spec.content))}\n")
        case "structural_tag":
            text, notes = tags.lower_tags(spec.content, options)
            return Lowered("llguidance", text, notes)
        case "grammar":
            return Lowered("llguidance", _grammar(spec.content))


def _regex(pattern: str) -> str:
    try:
        language = whole(pattern)
    except UnsupportedPattern as error:
        raise InvalidSpec(f"{error}. Way out: rewrite the expression without it") from None
    except InvalidSpec as error:
        raise InvalidSpec(
            f"{error}. Way out: correct it; a backslash before a character stands for the character"
        ) from None
    if language == NEVER:
        reason = f"no text matches the regular expression {pattern[:200]!r}"
        raise InvalidSpec(f"{reason}. Way out: look for what contradicts itself, as in `a^` or an empty class")
    return f"{quote.definitions(raw=True)}start: TEXT\nTEXT: {quote.terminal(language, raw=True)}\n"


def _choices(content: str) -> list[str]:
    try:
        options: Any = json.loads(content)
    except ValueError as error:
        raise InvalidSpec(f"choice must be a JSON list of texts: {error}") from None
    if not isinstance(options, list) or not options or not all(isinstance(o, str) for o in options):
        raise InvalidSpec("choice must be a JSON list of at least one text")
    return options


def _grammar(text: str) -> str:
    """Lark text; EBNF (`root ::= ...`) is translated."""
    if not re.search(r"^\s*[\w-]+\s*::=", text, re.MULTILINE):
        return text
    llguidance.require()
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(text)
    except Exception as error:
        reason = f"the EBNF grammar does not parse: {' '.join(str(error).split())}"
        raise InvalidSpec(f"{reason}. Way out: correct it there, or write it in Lark's notation") from None
