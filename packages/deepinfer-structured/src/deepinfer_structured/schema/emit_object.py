"""Objects as rules: named properties in schema order, then all others."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING

from deepinfer_structured.regex import ANY as ANY_TEXT
from deepinfer_structured.regex import Node as Language
from deepinfer_structured.regex import alt, both, complement, literal, matches
from deepinfer_structured.regex.finite import texts
from deepinfer_structured.schema import cases as c
from deepinfer_structured.schema import emit_unordered
from deepinfer_structured.schema.emit_unordered import Plan, Property
from deepinfer_structured.schema.obligation import NEVER, TOP, Obligation, join
from deepinfer_structured.schema.rules import COLON, COMMA, DEAD, EPSILON, Expr, Ref, Term, choice, many, maybe, seq

if TYPE_CHECKING:
    from deepinfer_structured.schema.emit import Emitter

_MAX_SUBSETS = 4
_MAX_COUNTED = 4000
_LONGEST_RULE = 256  # properties; each rule is copied as it grows
_MAX_NAMED = 32  # keys of a small language become named properties
_OPEN, _CLOSE = Term('"{"'), Term('"}"')


def emit(emitter: Emitter, case: c.Object) -> Expr:
    """The rule body of an object case."""
    if _counts_keys(case):
        case = _name_keys(case)
    return choice(*(_object(emitter, found, witnesses) for found, witnesses in _settle(emitter, case)))


def _counts_keys(case: c.Object) -> bool:
    """Whether a repeated key could break the case: JSON keeps one of its values, and one property.

    What must be there and is not named may be overwritten. A count is met with one unnamed property, however often its
    key is written; beyond that, repetitions would be counted.
    """
    return case.low > len(case.required) + 1 or any(wanted != TOP for _, wanted in case.exists)


def _name_keys(case: c.Object) -> c.Object:
    """The case with the keys of small languages as names, each of which is written once."""
    languages = [key for key, _ in _others(case)] + [language for language, _ in case.exists]
    names = dict.fromkeys(name for language in languages for name in texts(language, _MAX_NAMED) or ())
    if not names or len(names) > 2 * _MAX_NAMED:
        return case
    return replace(case, properties=(*case.properties, c.Properties(tuple((name, TOP) for name in names))))


def _settle(emitter: Emitter, case: c.Object) -> list[tuple[c.Object, tuple[tuple[Language, Obligation], ...]]]:
    """Decide where each `exists` is met: at a named property, or at another one."""
    settled: list[tuple[c.Object, tuple[tuple[Language, Obligation], ...]]] = [(replace(case, exists=()), ())]
    for language, wanted in case.exists:
        grown = []
        for found, witnesses in settled:
            for name in _names(found):
                if matches(language, name):
                    here = c.Object((c.Properties(((name, wanted),)),), (name,))
                    together = emitter.solver.meet_two(found, here)
                    if isinstance(together, c.Object):
                        grown.append((together, witnesses))
            for i, (key, value) in enumerate(witnesses):  # one property may serve several
                shared = (both(key, language), join(value, wanted))
                grown.append((found, (*witnesses[:i], shared, *witnesses[i + 1 :])))
            grown.append((found, (*witnesses, (language, wanted))))
        settled = grown[: emitter.solver.options.limits.max_cases]
    return settled


def _names(case: c.Object) -> tuple[str, ...]:
    named = [n for group in case.properties for n, _ in group.names]
    return tuple(dict.fromkeys([*named, *case.required]))


def _object(emitter: Emitter, case: c.Object, witnesses: tuple[tuple[Language, Obligation], ...]) -> Expr:
    named, needed = [], frozenset(case.required)
    for name in _names(case):
        required = name in needed
        value = emitter.solver.value_at(case, name)
        allowed = all(matches(k, name) for k in case.keys) and emitter.solver.satisfiable(value)
        if allowed:
            named.append(Property(seq(emitter.name(name), COLON, emitter.value(value)), required))
        elif required:
            return DEAD
    others = _others(case)
    extra = choice(*(_pair(emitter, k, o) for k, o in _merge(others)))
    met = tuple(
        choice(*(_pair(emitter, both(k, wanted_key), join(o, wanted)) for k, o in others))
        for wanted_key, wanted in witnesses
    )
    most = _most_others(others, case.low) if extra != DEAD else len(met)
    if DEAD in met or (most is not None and case.low > len(named) + most):
        return DEAD
    if (extra != DEAD or met) and _counts_keys(replace(case, exists=witnesses)):
        emitter.guard_keys()
    plan = Plan(tuple(named), extra, met)
    if emitter.solver.options.property_order == "any" and emit_unordered.fits(plan, case.low, case.high):
        return seq(_OPEN, emit_unordered.emit(emitter, plan, case.low, case.high), _CLOSE)
    sure = sum(p.required for p in named) + len(met)
    if case.low <= sure and case.high is None:
        return seq(_OPEN, _properties(emitter, plan), _CLOSE)
    return seq(_OPEN, _counted(emitter, plan, case.low, case.high), _CLOSE)


def _pair(emitter: Emitter, key: Language, value: Obligation) -> Expr:
    if texts(key, _MAX_NAMED) == [] or value == NEVER or not emitter.solver.satisfiable(value):
        return DEAD
    return seq(emitter.key(key), COLON, emitter.value(value))


def _others(case: c.Object) -> list[tuple[Language, Obligation]]:
    """The properties that are not named, split by the patterns that their keys are in."""
    patterns = tuple(dict.fromkeys(k for group in case.properties for k, _ in group.patterns))
    names = _names(case)
    unnamed = complement(alt(*(literal(n) for n in names))) if names else ANY_TEXT
    found = []
    for inside in _subsets(patterns):
        key = both(*case.keys, *inside, *(complement(p) for p in patterns if p not in inside), unnamed)
        value = join(*(_value(group, inside) for group in case.properties))
        if value != NEVER and texts(key, _MAX_NAMED) != []:
            found.append((key, value))
    return found


def _most_others(others: list[tuple[Language, Obligation]], low: int) -> int | None:
    """How many keys there are that are not named; None for many, or if it cannot be told."""
    if not 1 < low <= _MAX_COUNTED:
        return None
    found = [texts(key, low) for key, _ in others]
    return None if None in found else len({name for names in found for name in names or ()})


def _subsets(patterns: tuple[Language, ...]) -> list[tuple[Language, ...]]:
    """All combinations of few patterns; of many, none, each alone, and all pairs."""
    largest = len(patterns) if len(patterns) <= _MAX_SUBSETS else 2 if len(patterns) <= 12 else 1
    return [s for size in range(largest + 1) for s in combinations(patterns, size)]


def _value(group: c.Properties, inside: tuple[Language, ...]) -> Obligation:
    own = [o for k, o in group.patterns if k in inside]
    return join(*own) if own else group.rest


def _merge(others: list[tuple[Language, Obligation]]) -> list[tuple[Language, Obligation]]:
    """Join the keys of equal values when one plain language can say it."""
    if all(o == TOP for _, o in others) and len(others) > 1:
        return [(alt(*(k for k, _ in others)), TOP)]
    return others


def _properties(emitter: Emitter, plan: Plan) -> Expr:
    """All properties with their commas; the number of properties is free."""
    named = plan.named
    first = next((i for i, p in enumerate(named) if p.required), len(named))
    rest: list[Expr] = [_tail(plan, after=True)]
    chain: list[Expr] = [rest[0]]  # chain[-1 - i]: what may follow once something was written
    for index in range(len(named) - 1, 0, -1):
        prop = named[index]
        step = seq(COMMA, prop.pair)
        body = seq(step if prop.required else maybe(step), chain[-1])
        if index <= first or index % _LONGEST_RULE == 0:
            name = emitter.fresh("o")
            emitter.out.rules[name] = body
            body = Ref(name)
        chain.append(body)
    options: list[Expr] = []
    for index in range(min(first + 1, len(named))):
        options.append(seq(named[index].pair, chain[len(named) - 1 - index]))
    if first == len(named):
        options.append(_tail(plan, after=False))
    return choice(*options)


def _tail(plan: Plan, *, after: bool) -> Expr:
    """Unnamed properties, with the witnesses among them; `after` says that something stands before."""
    extras = many(seq(COMMA, plan.extra), 0, None) if plan.extra != DEAD else EPSILON
    if after:
        parts: list[Expr] = [extras]
        for witness in plan.witnesses:
            parts += [COMMA, witness, extras]
        return seq(*parts)
    if not plan.witnesses:
        return maybe(seq(plan.extra, extras)) if plan.extra != DEAD else EPSILON
    before = many(seq(plan.extra, COMMA), 0, None) if plan.extra != DEAD else EPSILON
    parts = [before, plan.witnesses[0], extras]
    for witness in plan.witnesses[1:]:
        parts += [COMMA, witness, extras]
    return seq(*parts)


def _counted(emitter: Emitter, plan: Plan, low: int, high: int | None) -> Expr:
    """All properties with commas, `low` to `high` of them: one rule for each place and count."""
    named = plan.named
    cap = low if high is None else min(high, len(named) + len(plan.witnesses) + max(low, 1))
    if len(named) * (cap + 1) > _MAX_COUNTED:
        cap = min(cap, _MAX_COUNTED // len(named))
        emitter.solver.notes[f"objects of at most {cap} properties are generated"] = None
        high = cap if high is None else min(high, cap)
        if low > cap:
            return DEAD
    memo: dict[tuple[int, int], Expr] = {}
    # built from the back, so that no rule refers to one that is missing
    for index in range(len(named), -1, -1):
        for count in range(min(index, cap) + 1):
            memo[index, count] = _counted_step(emitter, plan, index, count, low, high, cap, memo)
    return memo[0, 0]


def _counted_step(
    emitter: Emitter,
    plan: Plan,
    index: int,
    count: int,
    low: int,
    high: int | None,
    cap: int,
    memo: dict[tuple[int, int], Expr],
) -> Expr:
    if index == len(plan.named):
        return _counted_tail(plan, count, low - count, None if high is None else high - count)
    prop = plan.named[index]
    options: list[Expr] = [] if prop.required else [memo[index + 1, count]]
    if high is None or count < high:
        step = prop.pair if count == 0 else seq(COMMA, prop.pair)
        options.append(seq(step, memo[index + 1, min(count + 1, cap)] if cap else memo[index + 1, 0]))
    name = emitter.fresh("n")
    emitter.out.rules[name] = choice(*options)
    return Ref(name)


def _counted_tail(plan: Plan, count: int, low: int, high: int | None) -> Expr:
    """`low` to `high` unnamed properties. A witness counts for one of them."""
    low = max(low, 0)
    must = len(plan.witnesses)
    if high is not None and (high < 0 or low > high or must > high):
        return DEAD
    if must:
        # the witnesses first, then what is left of the count
        parts: list[Expr] = []
        for i, witness in enumerate(plan.witnesses):
            parts += ([COMMA] if count or i else []) + [witness]
        if plan.extra == DEAD:
            return seq(*parts) if low <= must else DEAD
        more = many(seq(COMMA, plan.extra), max(low - must, 0), None if high is None else high - must)
        return seq(*parts, more)
    if plan.extra == DEAD or high == 0:
        return EPSILON if low == 0 else DEAD
    if count:
        return many(seq(COMMA, plan.extra), low, high)
    some = seq(plan.extra, many(seq(COMMA, plan.extra), max(low - 1, 0), None if high is None else high - 1))
    return some if low else maybe(some)
