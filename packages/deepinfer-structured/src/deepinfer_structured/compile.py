"""Specifications into grammars."""

from __future__ import annotations

import json

from deepinfer_structured.config import Options
from deepinfer_structured.engines.llguidance import LlguidanceGrammar, require
from deepinfer_structured.errors import InvalidSpec
from deepinfer_structured.grammar import Grammar
from deepinfer_structured.spec import Spec
from deepinfer_structured.vocab import Vocabulary


def compile_spec(spec: Spec, vocabulary: Vocabulary, options: Options | None = None) -> Grammar:
    """Compile a specification for a vocabulary.

    Raises:
        InvalidSpec: the specification is malformed or nothing can satisfy it.
        UnsupportedSchema: a keyword cannot be enforced and the policy is `error`.
        LimitExceeded: it is too large, deep or slow.
        EngineMissing: no installed library can enforce it.
    """
    options = options or Options()
    text = _lower(spec, options)
    return Grammar(spec, vocabulary, "llguidance", LlguidanceGrammar(text, vocabulary))


def _lower(spec: Spec, options: Options) -> str:
    lib = require()
    if spec.kind in ("json_schema", "json_object"):
        schema = {"type": "object"} if spec.kind == "json_object" else _load(spec.content)
        blank = {"whitespace_pattern": f"[ \\n\\r\\t]{{1,{options.max_whitespace}}}"}
        return lib.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=blank)
    if spec.kind == "regex":
        return lib.LLMatcher.grammar_from_regex(spec.content)
    if spec.kind == "choice":
        return "start: " + " | ".join(json.dumps(o) for o in json.loads(spec.content))
    return spec.content


def _load(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidSpec(f"the JSON schema is not JSON: {error}") from None
