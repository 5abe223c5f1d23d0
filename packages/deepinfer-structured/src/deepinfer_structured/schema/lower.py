"""A JSON schema to the text of a Lark grammar."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from deepinfer_structured.config import Options
from deepinfer_structured.engines.llguidance import bounds_whitespace
from deepinfer_structured.errors import LimitExceeded, StructuredError, UnsatisfiableSchema
from deepinfer_structured.regex import quote
from deepinfer_structured.schema import blame, values
from deepinfer_structured.schema.audit import check_characters, remarks
from deepinfer_structured.schema.document import Document
from deepinfer_structured.schema.emit import Emitter
from deepinfer_structured.schema.obligation import must
from deepinfer_structured.schema.solver import Solver


@dataclass(frozen=True, slots=True)
class Lowered:
    """A grammar that needs no vocabulary yet, and remarks for the user.

    `guarded` says that `uniqueItems` is not in the grammar, `distinct_keys` that keys must not repeat and the grammar lets
    them; both need `deepinfer_structured.guard`. `most_rules` and `longest_terminals` are the places (pointer, keyword) that
    the largest parts of the grammar come from.
    """

    lark: str
    notes: tuple[str, ...]
    guarded: bool = False
    distinct_keys: bool = False
    most_rules: blame.Place = ("", "")
    longest_terminals: blame.Place = ("", "")


def lower(text: str, options: Options, *, count_whitespace: bool = True) -> Lowered:
    """Lower the JSON text of a schema.

    Args:
        text: the schema.
        options: see `Options`.
        count_whitespace: whether the grammar bounds whitespace. One that does not has cheaper masks, and needs
            `deepinfer_structured.whitespace` beside it.

    Raises:
        InvalidSpec: not a JSON schema.
        UnsupportedSchema: a keyword cannot be enforced.
        UnsatisfiableSchema: no value fits.
        LimitExceeded: too large or too deep.
    """
    if len(text) > options.limits.max_bytes:
        raise LimitExceeded(f"the schema has {len(text)} bytes, the limit is {options.limits.max_bytes}; split it")
    schema = values.load(text)
    if values.depth(schema, options.limits.max_depth) > options.limits.max_depth:
        reason = f"the schema is nested deeper than {options.limits.max_depth}"
        raise LimitExceeded(reason, "", _deepest(schema), "move inner schemas to $defs and refer to them")
    check_characters(schema)
    try:
        return _lower(schema, options, count_whitespace)
    except RecursionError:
        way_out = "move inner schemas to $defs and refer to them"
        raise LimitExceeded("the schema is nested too deeply", *blame.of_text(schema), way_out) from None


def _lower(schema: Any, options: Options, count_whitespace: bool) -> Lowered:
    document = Document(schema)
    solver = Solver(document, options)
    pattern = f"[ \\n\\r\\t]{{1,{options.max_whitespace if count_whitespace else ''}}}"
    emitter = Emitter(solver, json.dumps(pattern) if options.max_whitespace else None)
    rules = emitter.run(must(document.root))
    rules.prune()
    if "start" not in rules.rules:
        if solver.dropped:
            raise next(iter(solver.dropped))
        raise UnsatisfiableSchema("no JSON value fits the schema")  # see `explain`
    # Inline `%json` schemas skip once where the library knows it, and must share their skipped expression with the rest.
    head = '%llguidance {"ignore_once": true}\n' if bounds_whitespace else "%llguidance {}\n"
    if options.max_whitespace:
        head += f"%ignore /{pattern}/\n"
    if options.max_whitespace and count_whitespace and not bounds_whitespace:
        solver.notes["whitespace inside a tag is not bounded: that needs llguidance 1.8 or later"] = None
    notes = dict.fromkeys([*remarks(schema), *solver.notes, *(f"narrowed: {e}" for e in solver.dropped)])
    return Lowered(
        head + quote.definitions() + rules.lark(),
        tuple(notes),
        emitter.guarded,
        emitter.distinct_keys,
        emitter.largest(textual=False),
        emitter.largest(textual=True),
    )


def explain(text: str, options: Options) -> UnsatisfiableSchema:
    """The error of a schema that nothing fits, with the keyword that stands against it."""
    schema = values.load(text)
    deadline = time.thread_time() + options.limits.seconds

    def fits(changed: Any) -> bool:
        if time.thread_time() > deadline:
            return False
        try:
            return bool(_lower(changed, options, count_whitespace=False))
        except (StructuredError, RecursionError):
            return False

    place = blame.of_contradiction(schema, fits) if isinstance(schema, dict) else ("", "false")
    return UnsatisfiableSchema("no JSON value fits the schema", *place, blame.SATISFIABLE)


def _deepest(schema: Any) -> str:
    """The keyword of the root under which a schema is nested the deepest."""
    if not isinstance(schema, dict):
        return ""
    return max(schema, key=lambda k: values.depth(schema[k], 10_000), default="")
