"""xgrammar behind `EngineMatcher`: used only where llguidance is missing, and only for what it is known to enforce.

The library drops keywords silently (`allOf` beside others, `pattern` beside `maxLength`, ...), so a JSON schema reaches
it only if every keyword at every place is on the list below, in a combination that it enforces.
"""

from __future__ import annotations

import importlib.util
import json
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from deepinfer_structured.bitmask import Mask
from deepinfer_structured.config import Options
from deepinfer_structured.errors import InvalidSpec, MatcherError, UnsupportedSchema
from deepinfer_structured.schema import values
from deepinfer_structured.spec import Spec
from deepinfer_structured.vocab import Vocabulary

available = importlib.util.find_spec("xgrammar") is not None and importlib.util.find_spec("torch") is not None
_compilers: weakref.WeakKeyDictionary[Vocabulary, Any] = weakref.WeakKeyDictionary()
_SILENT = {"title", "description", "default", "examples", "$comment", "$schema", "$id"}
_ALLOWED: dict[str, set[str]] = {
    "object": {"type", "properties", "required", "additionalProperties"},
    "array": {"type", "items"},
    "string": {"type", "enum"},
    "integer": {"type"},
    "number": {"type"},
    "boolean": {"type"},
    "null": {"type"},
}
_ROLLBACK = 512


class XgrammarMatcher:
    """One sequence."""

    engine = "xgrammar"
    __slots__ = ("native",)

    def __init__(self, native: Any) -> None:
        self.native = native

    def accept(self, token_ids: Sequence[int]) -> int:
        for i, token in enumerate(token_ids):
            if not self.native.accept_token(token):
                return i
        return len(token_ids)

    def takes(self, token_ids: list[int]) -> bool:
        taken = self.accept(token_ids)
        self.rollback(taken)
        return taken == len(token_ids)

    def rollback(self, count: int) -> None:
        if count > _ROLLBACK:
            raise MatcherError(f"cannot roll back {count} tokens, at most {_ROLLBACK}")
        self.native.rollback(count)

    def fill(self, row: Mask) -> None:
        import torch

        self.native.fill_next_token_bitmask(torch.from_numpy(np.ascontiguousarray(row)[None]), 0)

    def forced(self) -> list[int]:
        return []  # the library forces text, not tokens

    def accepting(self) -> bool:
        return bool(self.native.is_completed())

    def stopped(self) -> bool:
        return bool(self.native.is_terminated())

    def check(self) -> None:
        """This library raises at once."""

    def clone(self) -> XgrammarMatcher:
        return XgrammarMatcher(self.native.fork())


class XgrammarGrammar:
    """A compiled grammar of the library."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def matcher(self) -> XgrammarMatcher:
        import xgrammar

        return XgrammarMatcher(
            xgrammar.GrammarMatcher(self._native, terminate_without_stop_token=False, max_rollback_tokens=_ROLLBACK)
        )


def gate(schema: Any, pointer: str = "") -> None:
    """Let a schema pass only if the library enforces all of it.

    Raises:
        UnsupportedSchema: naming the first keyword that is not on the list.
    """
    way_out = "pip install llguidance, which enforces it"
    if not isinstance(schema, dict):
        raise UnsupportedSchema(pointer, "true/false", "only objects are enforced by xgrammar", way_out)
    kind = schema.get("type")
    allowed = _ALLOWED.get(kind, set()) if isinstance(kind, str) else set()
    for keyword in schema:
        if keyword not in allowed | _SILENT:
            raise UnsupportedSchema(pointer, keyword, "xgrammar is not known to enforce it", way_out)
    if not allowed:
        raise UnsupportedSchema(pointer, "type", "xgrammar needs one type at every place", way_out)
    if kind == "object":
        _gate_object(schema, pointer, way_out)
    elif kind == "array" and "items" in schema:
        gate(schema["items"], f"{pointer}/items")
    elif kind == "string" and not all(isinstance(v, str) for v in schema.get("enum", ["x"])):
        raise UnsupportedSchema(pointer, "enum", "xgrammar accepts values of other types", way_out)


def _gate_object(schema: dict[str, Any], pointer: str, way_out: str) -> None:
    named = schema.get("properties", {})
    if schema.get("additionalProperties") is not False:
        raise UnsupportedSchema(pointer, "additionalProperties", "xgrammar needs it to be false", way_out)
    if not named or not set(schema.get("required", [])) <= named.keys():
        raise UnsupportedSchema(pointer, "required", "xgrammar drops names that are not in properties", way_out)
    for name, inner in named.items():
        gate(inner, f"{pointer}/properties/{name}")


def compile_gated(spec: Spec, vocabulary: Vocabulary, options: Options) -> tuple[XgrammarGrammar, tuple[str, ...]]:
    """Compile what the library is known to enforce: gated JSON schemas, choices, EBNF.

    Raises:
        UnsupportedSchema: the gate refuses the schema.
        InvalidSpec: the specification is malformed or of another kind.
    """
    import xgrammar

    compiler = _compiler(vocabulary)
    note = "llguidance is not installed: only plain schemas, choices and EBNF are enforced"
    try:
        if spec.kind == "json_schema":
            schema = values.load(spec.content)
            gate(schema)
            blank = max(options.max_whitespace, 1)
            native = compiler.compile_json_schema(spec.content, strict_mode=False, max_whitespace_cnt=blank)
        elif spec.kind == "choice":
            rules = " | ".join(json.dumps(o, ensure_ascii=False) for o in json.loads(spec.content))
            native = compiler.compile_grammar(xgrammar.Grammar.from_ebnf(f"root ::= {rules}"))
        elif spec.kind == "grammar":
            native = compiler.compile_grammar(xgrammar.Grammar.from_ebnf(spec.content))
        else:
            raise InvalidSpec(f"{spec.kind} needs llguidance: pip install llguidance")
    except (RuntimeError, ValueError) as error:
        if isinstance(error, InvalidSpec | UnsupportedSchema):
            raise
        raise InvalidSpec(str(error).strip().split("\n")[-1][:300]) from None
    return XgrammarGrammar(native), (note,)


def _compiler(vocabulary: Vocabulary) -> Any:
    import xgrammar

    made = _compilers.get(vocabulary)
    if made is None:
        info = xgrammar.TokenizerInfo(
            vocabulary.padded_tokens,
            vocab_size=vocabulary.size,
            stop_token_ids=list(vocabulary.eos_ids),
        )
        made = _compilers[vocabulary] = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    return made
