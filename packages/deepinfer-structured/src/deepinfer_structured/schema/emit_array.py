"""Arrays as rules."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

from deepinfer_structured.errors import LimitExceeded, UnsupportedSchema
from deepinfer_structured.schema import blame
from deepinfer_structured.schema import cases as c
from deepinfer_structured.schema.cardinality import how_many
from deepinfer_structured.schema.obligation import NEVER, Obligation, join
from deepinfer_structured.schema.rules import COMMA, DEAD, EPSILON, Expr, Or, Ref, Term, choice, many, maybe, seq
from deepinfer_structured.schema.values import TYPES, canon

if TYPE_CHECKING:
    from deepinfer_structured.schema.emit import Emitter

_OPEN, _CLOSE = Term('"["'), Term('"]"')
_MAX_STATES = 2000
_MAX_UNIQUE = 63  # a rule's parameter has 64 bits


def emit(emitter: Emitter, case: c.Array) -> Expr:
    """The rule body of an array case."""
    if case.unique and (case.high is None or case.high > 1):
        found = _unique(emitter, case)
        if found is not None:
            return found
        most = how_many(emitter.solver, case.at(0)) if not _prefix_length(case) else None
        if most is not None:
            case = replace(case, high=most if case.high is None else min(case.high, most))
            if case.low > most:
                return DEAD
    if case.contains:
        return seq(_OPEN, _counting(emitter, case), _CLOSE)
    return seq(_OPEN, _plain(emitter, case), _CLOSE)


def _prefix_length(case: c.Array) -> int:
    return max((len(group.prefix) for group in case.items), default=0)


def _plain(emitter: Emitter, case: c.Array) -> Expr:
    """Items with their commas: a prefix, then `rest` repeated."""
    high, prefix = case.high, _prefix_length(case)
    for index in range(prefix + 1):
        if (high is None or index < high) and not emitter.solver.satisfiable(case.at(index)):
            high = index  # no item can stand here
            break
    if high is not None and case.low > high:
        return DEAD
    prefix = prefix if high is None else min(prefix, high)
    rest = emitter.value(case.at(prefix)) if high is None or high > prefix else DEAD
    if not prefix:
        return _repeated(rest, case.low, high)
    tail = _more(rest, max(case.low - prefix, 0), None if high is None else high - prefix)
    for index in range(prefix - 1, -1, -1):
        item = emitter.value(case.at(index))
        body = seq(COMMA, item, tail) if index else seq(item, tail)
        tail = body if index < case.low else maybe(body)
    return tail


def _more(item: Expr, low: int, high: int | None) -> Expr:
    """`low` to `high` further items, each with its comma."""
    if item == DEAD or high == 0:
        return EPSILON if low == 0 else DEAD
    return many(seq(COMMA, item), low, high)


def _repeated(item: Expr, low: int, high: int | None) -> Expr:
    if item == DEAD or high == 0:
        return EPSILON if low == 0 else DEAD
    some = seq(item, many(seq(COMMA, item), max(low - 1, 0), None if high is None else high - 1))
    return some if low else maybe(some)


def _finite(emitter: Emitter, obligation: Obligation) -> list[Any] | None:
    """The values that meet an obligation, if they are few."""
    values: dict[Any, Any] = {}
    for type_ in TYPES:
        for case in emitter.solver.cases(obligation, type_):
            if not isinstance(case, c.Values):
                return None
            values |= {canon(v): v for v in case.values}
    return list(values.values()) if len(values) <= _MAX_UNIQUE else None


def _unique(emitter: Emitter, case: c.Array) -> Expr | None:
    """Distinct items out of few values: the rule's parameter holds a bit for each value used. None if not so."""
    values = _finite(emitter, case.at(0)) if not _prefix_length(case) and not case.contains else None
    if values is None:
        emitter.guard_unique()
        return None
    if case.low > len(values):
        return DEAD
    high = len(values) if case.high is None else min(case.high, len(values))
    bits = f"[0:{max(len(values), 1)}]"
    first, more = emitter.fresh("u"), emitter.fresh("u")
    literals = [emitter.literal(v) for v in values]
    steps = [seq(item, Ref(more, f"set_bit({i})")) for i, item in enumerate(literals)]
    free = tuple(f"bit_clear({i})" for i in range(len(values)))
    room = tuple(f"and({test}, bit_count_lt({bits}, {high}))" for test in free)
    done = f"bit_count_ge({bits}, {case.low})"
    start = [EPSILON] if case.low == 0 else []
    emitter.out.rules[first] = Or((*start, *(steps if high else [])), (*("" for _ in start), *(free if high else ())))
    emitter.out.rules[more] = Or((EPSILON, *(seq(COMMA, s) for s in steps)), (done, *room))
    emitter.out.parametric |= {first, more}
    return seq(_OPEN, Ref(first, "0x0"), _CLOSE) if steps or case.low == 0 else DEAD


def _counting(emitter: Emitter, case: c.Array) -> Expr:
    """Items under `contains`: one rule for each position (up to where positions stop to matter) and counts."""
    rules = case.contains
    last = max([1, _prefix_length(case), case.low, case.high or 0, *(r.start for r in rules)])
    caps = [r.low if r.high is None else r.high for r in rules]
    states = (last + 1) * _product(cap + 1 for cap in caps)
    if states > _MAX_STATES:
        reason = f"counts up to {max(caps)} over {last} positions need {states} states"
        place = blame.of_path(emitter.solver.path)[0]
        raise LimitExceeded(reason, place, "contains", "lower minContains, maxContains, minItems or maxItems")
    if any(r.high is not None and r.opposite is None for r in rules):
        raise UnsupportedSchema("", "maxContains", "the complement of its schema is not expressible")
    names = {
        (index, counts): emitter.fresh("k")
        for index in range(last + 1)
        for counts in product(*(range(cap + 1) for cap in caps))
    }
    for (index, counts), name in names.items():
        emitter.out.rules[name] = _counting_step(emitter, case, index, counts, names, last)
    return Ref(names[0, (0,) * len(rules)])


def _counting_step(
    emitter: Emitter,
    case: c.Array,
    index: int,
    counts: tuple[int, ...],
    names: dict[tuple[int, tuple[int, ...]], str],
    last: int,
) -> Expr:
    rules, options = case.contains, []
    if index >= case.low and all(n >= r.low for n, r in zip(counts, rules, strict=True)):
        options.append(EPSILON)
    if case.high is None or index < case.high:
        for chosen in product((False, True), repeat=len(rules)):
            item, after = _chosen(case, index, counts, chosen)
            if item != NEVER and emitter.solver.satisfiable(item):
                value = emitter.value(item)
                step = seq(COMMA, value) if index else value
                options.append(seq(step, Ref(names[min(index + 1, last), after])))
    return choice(*options)


def _chosen(
    case: c.Array, index: int, counts: tuple[int, ...], chosen: tuple[bool, ...]
) -> tuple[Obligation, tuple[int, ...]]:
    """The obligation of an item that counts for the chosen rules, and the counts after it."""
    parts, after = [case.at(index)], []
    for rule, count, counted in zip(case.contains, counts, chosen, strict=True):
        active = index >= rule.start
        if counted and (not active or (rule.high is None and count >= rule.low)):
            return NEVER, counts  # counting changes nothing: the other choice covers it
        if counted and rule.high is not None and count >= rule.high:
            return NEVER, counts
        if counted:
            parts.append(rule.wanted)
        elif active and rule.high is not None:
            assert rule.opposite is not None
            parts.append(rule.opposite)
        after.append(count + counted)
    return join(*parts), tuple(after)


def _product(numbers: Any) -> int:
    found = 1
    for n in numbers:
        found *= n
    return found
