"""What the worker process runs: lowering and building that may take long, need much memory, or end the process."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace

from deepinfer_structured.config import Options
from deepinfer_structured.engines import llguidance
from deepinfer_structured.errors import LimitExceeded, StructuredError, UnsatisfiableSchema
from deepinfer_structured.lowering import Lowered, lower_spec
from deepinfer_structured.schema import values
from deepinfer_structured.schema.lower import explain
from deepinfer_structured.spec import Spec
from deepinfer_structured.vocab import Vocabulary

_FEW_CASES = 4
_FEWER_SECONDS = 0.25  # of the limit; with the first analysis still less than the worker may take


def lower_on_trial(spec: Spec, options: Options) -> Lowered:
    """Lower a specification; a schema that is too much is lowered again with few alternatives. Raises what `lower_spec` does.

    Few alternatives make the set of texts smaller, and the notes say so.
    """
    try:
        return lower_spec(spec, options)
    except LimitExceeded:
        limits = options.limits
        if spec.kind != "json_schema" or limits.max_cases <= _FEW_CASES:
            raise
        fewer = replace(limits, max_cases=_FEW_CASES, seconds=_FEWER_SECONDS * limits.seconds)
        with contextlib.suppress(StructuredError):
            return lower_spec(spec, replace(options, limits=fewer))
        raise


def build_on_trial(text: str) -> None:
    """Build a grammar for a small vocabulary, to see that the library can."""
    llguidance.LlguidanceGrammar(text, _vocabulary())


def lower_natively(spec: Spec, options: Options) -> Lowered:
    """The grammar of llguidance's own schema compiler, which enforces or refuses every keyword that it meets.

    Raises:
        LimitExceeded: the schema is too large or deep for it, or no object.
        ValueError: the library refuses it.
    """
    schema = values.load(spec.content)
    if len(spec.content) > options.limits.max_bytes or not isinstance(schema, dict):
        raise LimitExceeded("the schema is too large, or no object")
    if values.depth(schema, options.limits.max_depth) > options.limits.max_depth:
        raise LimitExceeded(f"the schema is nested deeper than {options.limits.max_depth}")
    overrides = {"whitespace_flexible": options.max_whitespace > 0}
    text = llguidance.require().LLMatcher.grammar_from_json_schema(spec.content, overrides=overrides)
    note = "compiled by llguidance: too many alternatives to be lowered here"
    bound, keys = options.max_whitespace or None, "minProperties" in spec.content
    return Lowered("llguidance", text, (note,), distinct_keys=keys, max_whitespace=bound)


def explain_misfit(spec: Spec, options: Options) -> UnsatisfiableSchema:
    """The error of a schema that nothing fits, with the keyword that stands against it."""
    return explain(spec.content, options)


@functools.cache
def _vocabulary() -> Vocabulary:
    return Vocabulary.bytewise()
