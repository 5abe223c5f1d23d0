"""A JSON schema to the text of a Lark grammar."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from deepinfer_structured.config import Options
from deepinfer_structured.engines.llguidance import bounds_whitespace
from deepinfer_structured.errors import LimitExceeded, UnsatisfiableSchema
from deepinfer_structured.regex import quote
from deepinfer_structured.schema import values
from deepinfer_structured.schema.document import Document
from deepinfer_structured.schema.emit import Emitter
from deepinfer_structured.schema.obligation import must
from deepinfer_structured.schema.solver import Solver


@dataclass(frozen=True, slots=True)
class Lowered:
    """A grammar that needs no vocabulary yet, and remarks for the user.

    `guarded` says that `uniqueItems` is not in the grammar, `distinct_keys` that keys must not repeat and the grammar lets
    them; both need `deepinfer_structured.guard`.
    """

    lark: str
    notes: tuple[str, ...]
    guarded: bool = False
    distinct_keys: bool = False


def lower(text: str, options: Options) -> Lowered:
    """Lower the JSON text of a schema.

    Raises:
        InvalidSpec: not a JSON schema.
        UnsupportedSchema: a keyword cannot be enforced.
        UnsatisfiableSchema: no value fits.
        LimitExceeded: too large or too deep.
    """
    if len(text) > options.limits.max_bytes:
        raise LimitExceeded(f"the schema has {len(text)} bytes, the limit is {options.limits.max_bytes}")
    schema = values.load(text)
    if values.depth(schema, options.limits.max_depth) > options.limits.max_depth:
        raise LimitExceeded(f"the schema is nested deeper than {options.limits.max_depth}")
    try:
        return _lower(schema, options)
    except RecursionError:
        raise LimitExceeded("the schema is nested too deeply") from None


def _lower(schema: Any, options: Options) -> Lowered:
    document = Document(schema)
    solver = Solver(document, options)
    pattern = f"[ \\n\\r\\t]{{1,{options.max_whitespace}}}"
    emitter = Emitter(solver, json.dumps(pattern) if options.max_whitespace else None)
    rules = emitter.run(must(document.root))
    rules.prune()
    if "start" not in rules.rules:
        if solver.dropped:
            raise next(iter(solver.dropped))
        raise UnsatisfiableSchema("no JSON value fits the schema")
    head = '%llguidance {"ignore_once": true}\n' if bounds_whitespace else "%llguidance {}\n"
    if options.max_whitespace:
        head += f"%ignore /{pattern}/\n"
    if options.max_whitespace and not bounds_whitespace:
        solver.notes["whitespace is not bounded: that needs llguidance 1.8 or later"] = None
    notes = [*solver.notes, *(f"narrowed: {e}" for e in solver.dropped)]
    return Lowered(head + quote.definitions() + rules.lark(), tuple(notes), emitter.guarded, emitter.distinct_keys)
