"""Specifications into grammars."""

from __future__ import annotations

from deepinfer_structured.config import Options
from deepinfer_structured.engines.llguidance import LlguidanceGrammar
from deepinfer_structured.grammar import Grammar
from deepinfer_structured.lowering import lower_spec
from deepinfer_structured.spec import Spec
from deepinfer_structured.vocab import Vocabulary


def compile_spec(spec: Spec, vocabulary: Vocabulary, options: Options | None = None) -> Grammar:
    """Compile a specification for a vocabulary, in the calling process.

    Raises:
        InvalidSpec: the specification is malformed or nothing can satisfy it.
        UnsupportedSchema: a keyword cannot be enforced and the policy is `error`.
        LimitExceeded: it is too large, deep or slow.
        EngineMissing: no installed library can enforce it.
    """
    found = lower_spec(spec, options or Options())
    return Grammar(spec, vocabulary, found.engine, LlguidanceGrammar(found.text, vocabulary), found.notes)
