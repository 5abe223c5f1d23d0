"""How many different values can meet an obligation, where they are few: an upper bound."""

from __future__ import annotations

from deepinfer_structured.regex.finite import texts
from deepinfer_structured.schema import cases as c
from deepinfer_structured.schema import numbers
from deepinfer_structured.schema.obligation import TOP, Obligation
from deepinfer_structured.schema.solver import Solver, string_language
from deepinfer_structured.schema.values import TYPES

MOST = 4096
_DEPTH = 4


def how_many(solver: Solver, obligation: Obligation, depth: int = _DEPTH) -> int | None:
    """At least as many as there are; None for many, or if it cannot be told."""
    if obligation == TOP:
        return None
    total = 0
    for type_ in TYPES:
        for case in solver.cases(obligation, type_):
            count = _of_case(solver, case, depth)
            if count is None or total + count > MOST:
                return None
            total += count
    return total


def _of_case(solver: Solver, case: c.Case, depth: int) -> int | None:
    match case:
        case c.Values(_, values):
            return len(values)
        case c.Number():
            listed = numbers.listed(case)
            return None if listed is None else len(listed)
        case c.String():
            found = texts(string_language(case), MOST // 8)
            return None if found is None else len(found)
        case c.Array():
            return _of_array(solver, case, depth)
        case c.Object():
            return _of_object(solver, case, depth)


def _of_object(solver: Solver, case: c.Object, depth: int) -> int | None:
    """Objects whose properties are all required, and of which each has few values."""
    if not depth or case.high is None or case.high > len(case.required):
        return None
    product = 1
    for name in case.required:
        values = how_many(solver, solver.value_at(case, name), depth - 1)
        if values is None or product * values > MOST:
            return None
        product *= values
    return product


def _of_array(solver: Solver, case: c.Array, depth: int) -> int | None:
    """Arrays of items of which there are none, or of few lengths and few items."""
    total, product = int(case.low == 0), 1
    for length in range(1, MOST):
        if case.high is not None and length > case.high:
            return total
        items = how_many(solver, case.at(length - 1), depth - 1) if depth else None
        if items is None or product * items > MOST:
            return None
        product *= items
        if product == 0:
            return total
        total += product if length >= case.low else 0
    return None
