"""Objects whose properties come in any order: the parameter of one rule holds a bit for each named property written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepinfer_structured.schema.rules import COMMA, DEAD, EPSILON, Expr, Or, Ref, seq

if TYPE_CHECKING:
    from deepinfer_structured.schema.emit import Emitter

_BITS = 60


@dataclass(frozen=True, slots=True)
class Property:
    """A named property: name, colon and value, and whether it must be written."""

    pair: Expr
    required: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """One way to write an object: named properties, `witnesses` (unnamed ones that must be there), any number of `extra`."""

    named: tuple[Property, ...]
    extra: Expr
    witnesses: tuple[Expr, ...]


def _counted_extras(plan: Plan, low: int, high: int | None) -> int:
    """How many unnamed properties must be told apart; 0 where the bounds hold for whatever the names allow."""
    sure = sum(p.required for p in plan.named) + len(plan.witnesses)
    most = len(plan.named) if plan.extra == DEAD and not plan.witnesses else None
    if low <= sure and (high is None or (most is not None and most <= high)):
        return 0
    return max(low if high is None else high, 1)


def fits(plan: Plan, low: int, high: int | None) -> bool:
    """Whether a bit for each name, and for each unnamed property that counts, fits into a parameter."""
    return len(plan.named) + len(plan.witnesses) + _counted_extras(plan, low, high) <= _BITS


def emit(emitter: Emitter, plan: Plan, low: int, high: int | None) -> Expr:
    """All properties with their commas, `low` to `high` of them."""
    ordered = sorted(plan.named, key=lambda p: not p.required)  # stable: required first, so that one test covers them
    needed = len(plan.witnesses) + sum(p.required for p in ordered)
    counted = _counted_extras(plan, low, high)
    steps: list[tuple[Expr, str, str]] = [
        (w, f"set_bit({i})", f"bit_clear({i})" if counted else "") for i, w in enumerate(plan.witnesses)
    ]
    steps += [(p.pair, f"set_bit({i})", f"bit_clear({i})") for i, p in enumerate(ordered, len(steps))]
    names = len(steps)
    if plan.extra != DEAD:
        steps += _extras(plan.extra, names, counted, high)
    if high is not None and high < needed:
        return DEAD
    if high == 0 or not steps:
        return EPSILON if not needed and not low else DEAD
    first, more, bits = emitter.fresh("p"), emitter.fresh("p"), f"[0:{names + counted}]"
    spare = [f"bit_count_lt([{needed}:{names + counted}], {high - needed})"] if counted and high is not None else []
    done = [f"is_ones([0:{needed}])"] if needed else []
    done += [f"bit_count_ge({bits}, {low})"] if counted and low else []
    # what must be written has its place: no other property takes it
    options = [
        (seq(body, Ref(more, change)), _all([test, *(spare if i >= needed else [])]))
        for i, (body, change, test) in enumerate(steps)
    ]
    begin = [(EPSILON, "")] if not needed and not low else []
    begin += options
    emitter.out.rules[first] = Or(tuple(o for o, _ in begin), tuple(t for _, t in begin))
    emitter.out.rules[more] = Or(
        (EPSILON, *(seq(COMMA, o) for o, _ in options)), (_all(done), *(t for _, t in options))
    )
    emitter.out.parametric |= {first, more}
    return Ref(first, "0x0")


def _extras(extra: Expr, offset: int, counted: int, high: int | None) -> list[tuple[Expr, str, str]]:
    """Steps for unnamed properties. The first `counted` of them set one bit each, in turn."""
    steps = []
    for i in range(offset, offset + counted):
        turn = [f"bit_clear({i})", *([f"bit_set({i - 1})"] if i > offset else [])]
        steps.append((extra, f"set_bit({i})", _all(turn)))
    if not counted:
        return [(extra, "_", "")]
    return steps if high is not None else [*steps, (extra, "_", f"bit_set({offset + counted - 1})")]


def _all(tests: list[str]) -> str:
    tests = [t for t in tests if t]
    found = tests.pop() if tests else ""
    for test in reversed(tests):
        found = f"and({test}, {found})"
    return found
