"""What the worker process runs: lowering and building that may take long, need much memory, or end the process."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace

from deepinfer_structured.config import Options
from deepinfer_structured.engines import llguidance
from deepinfer_structured.errors import LimitExceeded, StructuredError, UnsatisfiableSchema
from deepinfer_structured.lowering import Lowered, lower_spec
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


def explain_misfit(spec: Spec, options: Options) -> UnsatisfiableSchema:
    """The error of a schema that nothing fits, with the keyword that stands against it."""
    return explain(spec.content, options)


@functools.cache
def _vocabulary() -> Vocabulary:
    return Vocabulary.bytewise()
