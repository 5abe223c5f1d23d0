"""Specifications into grammars, safely: what may hang or crash is tried in a worker process first."""

from __future__ import annotations

import atexit
import functools
import threading
from dataclasses import replace

from deepinfer_structured.config import Options
from deepinfer_structured.engines import llguidance, xgrammar
from deepinfer_structured.errors import EngineMissing, LimitExceeded, StructuredError
from deepinfer_structured.grammar import Grammar
from deepinfer_structured.lowering import Lowered, lower_spec
from deepinfer_structured.schema import values
from deepinfer_structured.spec import Spec
from deepinfer_structured.store import GrammarStore
from deepinfer_structured.vocab import Vocabulary
from deepinfer_structured.worker import Worker

_INLINE_BYTES = 8_000  # a specification up to this size is lowered in the calling process
_INLINE_SECONDS = 1.0
_lock = threading.Lock()


def compile_spec(spec: Spec, vocabulary: Vocabulary, options: Options | None = None) -> Grammar:
    """Compile a specification for a vocabulary. Safe for text from outside; may be called on any thread.

    Small JSON schemas are compiled in the calling process under a short time limit. Everything else is lowered, and
    built once on trial, in a worker process that is kept warm and may die without harm.

    Raises:
        InvalidSpec: the specification is malformed or nothing can satisfy it.
        UnsupportedSchema: a keyword cannot be enforced and the policy is `error`.
        LimitExceeded: it is too large, deep or slow.
        EngineMissing: no installed library can enforce it.
    """
    options = options or Options()
    if not llguidance.available:
        return _compile_without_llguidance(spec, vocabulary, options)
    found = lower_safely(spec, options)
    compiled = llguidance.LlguidanceGrammar(found.text, vocabulary)
    return Grammar(spec, vocabulary, found.engine, compiled, found.notes, found.unique, found.distinct_keys)


@functools.lru_cache(maxsize=1024)
def lower_safely(spec: Spec, options: Options) -> Lowered:
    """Lower a specification; its text is safe to be built in this process. Results are kept for equal specifications."""
    store = GrammarStore(options.cache_dir) if options.cache_dir else None
    found = store.get(spec, options) if store else None
    if found is None:
        found = _lower(spec, options)
        if store:
            store.put(spec, options, found)
    return found


def _lower(spec: Spec, options: Options) -> Lowered:
    quick = spec.kind in ("json_schema", "json_object", "choice") and len(spec.content) <= _INLINE_BYTES
    if quick:
        seconds = min(_INLINE_SECONDS, options.limits.seconds)
        found = _lower_quickly(spec, replace(options, limits=replace(options.limits, seconds=seconds)))
        if found is not None and len(found.text) <= options.limits.safe_bytes:
            return found
    return _worker(options.limits.worker_mib).call(
        __name__, "lower_on_trial", (spec, options), 2 * options.limits.seconds + 1.0
    )


def _lower_quickly(spec: Spec, options: Options) -> Lowered | None:
    try:
        return lower_spec(spec, options)
    except LimitExceeded:
        return None  # the worker has the full limits, and the last word


def lower_on_trial(spec: Spec, options: Options) -> Lowered:
    """Lower a specification and build it once for a small vocabulary: what the worker process runs.

    A JSON schema whose alternatives multiply beyond the limits is given to llguidance's own schema compiler instead,
    which enforces or refuses every keyword that it meets.
    """
    seconds = 0.7 * options.limits.seconds if spec.kind == "json_schema" else options.limits.seconds
    try:
        found = lower_spec(spec, replace(options, limits=replace(options.limits, seconds=seconds)))
        _build_on_trial(found)
    except StructuredError as error:
        limited = isinstance(error, LimitExceeded) or str(error).startswith("panic")
        if spec.kind != "json_schema" or not limited:
            raise
        found = _native_schema(spec, options, error)
        _build_on_trial(found)
    return found


def _native_schema(spec: Spec, options: Options, reason: StructuredError) -> Lowered:
    schema = values.load(spec.content)
    if len(spec.content) > options.limits.max_bytes or not isinstance(schema, dict):
        raise reason
    if values.depth(schema, options.limits.max_depth) > options.limits.max_depth:
        raise reason
    blank = {"whitespace_pattern": f"[ \\n\\r\\t]{{1,{options.max_whitespace}}}"} if options.max_whitespace else {}
    overrides = blank or {"whitespace_flexible": False}
    text = llguidance.require().LLMatcher.grammar_from_json_schema(spec.content, overrides=overrides)
    try:
        llguidance.LlguidanceGrammar(text, _trial_vocabulary())
    except StructuredError as error:
        raise LimitExceeded(f"{reason}; and llguidance refuses it: {error}") from None
    note = "compiled by llguidance: too many alternatives to be lowered here"
    return Lowered("llguidance", text, (note,), distinct_keys="minProperties" in spec.content)


def _build_on_trial(found: Lowered) -> None:
    llguidance.LlguidanceGrammar(found.text, _trial_vocabulary())


@functools.cache
def _trial_vocabulary() -> Vocabulary:
    return Vocabulary.bytewise()


@functools.cache
def _worker(memory_mib: int) -> Worker:
    with _lock:
        worker = Worker(memory_mib)
        atexit.register(worker.close)
        return worker


def _compile_without_llguidance(spec: Spec, vocabulary: Vocabulary, options: Options) -> Grammar:
    if not xgrammar.available:
        raise EngineMissing("no grammar library is installed; install deepinfer-structured[llguidance] (or [xgrammar])")
    compiled, notes = xgrammar.compile_gated(spec, vocabulary, options)
    return Grammar(spec, vocabulary, "xgrammar", compiled, notes)
