"""Specifications into grammars, safely: what may hang or crash is tried in a worker process first."""

from __future__ import annotations

import atexit
import functools
import threading
from dataclasses import replace
from typing import Any

from deepinfer_structured import whitespace
from deepinfer_structured.config import Options
from deepinfer_structured.engines import llguidance, xgrammar
from deepinfer_structured.errors import EngineMissing, InvalidSpec, LimitExceeded, StructuredError, UnsatisfiableSchema
from deepinfer_structured.grammar import Grammar
from deepinfer_structured.lowering import Lowered, lower_spec
from deepinfer_structured.schema import blame, values
from deepinfer_structured.spec import Spec
from deepinfer_structured.store import GrammarStore
from deepinfer_structured.vocab import Vocabulary
from deepinfer_structured.worker import Worker

_INLINE_BYTES = 8_000  # a specification up to this size is lowered in the calling process
_INLINE_SECONDS = 1.0
_TEXTUAL = ("fuel", "lexeme", "regex", "NoExtension")  # words of the library's messages about terminals
_INLINE = "failed to compile JSON schema"  # of an inline schema, as numbers with a `multipleOf` are written
_TRIAL = "deepinfer_structured.trial"
_lock = threading.Lock()


def compile_spec(spec: Spec, vocabulary: Vocabulary, options: Options | None = None) -> Grammar:
    """Compile a specification for a vocabulary. Safe for text from outside; may be called on any thread.

    Small JSON schemas are compiled in the calling process under a short time limit. Everything else is lowered, and
    built once on trial, in a worker process that is kept warm and may die without harm.

    Raises:
        InvalidSpec: the specification is malformed or nothing can satisfy it.
        UnsupportedSchema: a keyword cannot be enforced and the policy is `error`.
        LimitExceeded: it is too large, deep or slow; for a schema, the keyword that is to blame is named.
        EngineMissing: no installed library can enforce it.
    """
    options = options or Options()
    if not llguidance.available:
        return _compile_without_llguidance(spec, vocabulary, options)
    found = lower_safely(spec, options)
    try:
        compiled = llguidance.LlguidanceGrammar(found.text, vocabulary)
    except StructuredError as error:
        raise _explained(error, spec, found, options) from None
    if found.max_whitespace is not None:
        whitespace.tables(
            vocabulary, found.max_whitespace
        )  # made here, not by the thread that starts the first sequence
    return Grammar(
        spec, vocabulary, found.engine, compiled, found.notes, found.unique, found.distinct_keys, found.max_whitespace
    )


@functools.lru_cache(maxsize=1024)
def lower_safely(spec: Spec, options: Options) -> Lowered:
    """Lower a specification; its text is safe to be built in this process. Results are kept for equal specifications."""
    store = GrammarStore(options.cache_dir) if options.cache_dir else None
    found = store.get(spec, options) if store else None
    if found is None:
        try:
            found = _lower(spec, options)
        except UnsatisfiableSchema as error:
            raise _explained(error, spec, None, options) from None
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
    try:
        return _tried(spec, _call("lower_on_trial", (spec, options), options), options)
    except LimitExceeded as error:
        if spec.kind != "json_schema" or error.keyword:
            raise
        raise _placed(spec, error) from None


def _lower_quickly(spec: Spec, options: Options) -> Lowered | None:
    try:
        return lower_spec(spec, options)
    except LimitExceeded:
        return None  # the worker has the full limits, and the last word


def _tried(spec: Spec, found: Lowered, options: Options) -> Lowered:
    """The grammar, if the worker can build it."""
    try:
        _call("build_on_trial", (found.text,), options)
    except StructuredError as error:
        raise _explained(error, spec, found, options) from None
    return found


def _explained(error: StructuredError, spec: Spec, found: Lowered | None, options: Options) -> StructuredError:
    """An error of a schema, or of the grammar that it was lowered to, with the keyword to blame and a way out."""
    if spec.kind == "grammar" and isinstance(error, InvalidSpec) and not isinstance(error, UnsatisfiableSchema):
        reason = f"the grammar does not compile: {str(error)[:300]} (line and column)"
        return InvalidSpec(f"{reason}. Way out: correct it there; Lark has `start: ...`, EBNF `root ::= ...`")
    if spec.kind != "json_schema" or getattr(error, "keyword", ""):
        return error
    if isinstance(error, UnsatisfiableSchema):
        try:
            return _call("explain_misfit", (spec, options), options)
        except StructuredError:
            return error
    if found is None:
        return error
    message = str(error)[:200]
    if _INLINE in message:
        place = blame.of_keyword(values.load(spec.content), "multipleOf")
        return LimitExceeded(f"the grammar library cannot express it: {message}", *place, blame.ROUNDER)
    textual = any(word in message for word in _TEXTUAL)
    pointer, keyword = found.longest_terminals if textual else found.most_rules
    if not keyword:
        return LimitExceeded(message)
    what = "its texts are too costly to match" if textual else f"its grammar is too large ({len(found.text)} bytes)"
    return LimitExceeded(f"{what}: {message}", pointer, keyword, blame.SHORTER if textual else blame.SMALLER)


def _placed(spec: Spec, error: LimitExceeded) -> LimitExceeded:
    """The error with the keyword that most likely is too much."""
    try:
        return LimitExceeded(error.reason, *blame.of_text(values.load(spec.content)), blame.FEWER)
    except StructuredError:
        return error


def _call(function: str, arguments: tuple[Any, ...], options: Options) -> Any:
    return _worker(options.limits.worker_mib).call(_TRIAL, function, arguments, 1.5 * options.limits.seconds)


@functools.cache
def _worker(memory_mib: int) -> Worker:
    with _lock:
        worker = Worker(memory_mib)
        atexit.register(worker.close)
        return worker


def _compile_without_llguidance(spec: Spec, vocabulary: Vocabulary, options: Options) -> Grammar:
    if not xgrammar.available:
        raise EngineMissing("no grammar library is installed: pip install llguidance (or xgrammar)")
    compiled, notes = xgrammar.compile_gated(spec, vocabulary, options)
    return Grammar(spec, vocabulary, "xgrammar", compiled, notes)
