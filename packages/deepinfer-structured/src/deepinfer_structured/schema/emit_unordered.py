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


def _counter_bits(plan: Plan, low: int, high: int | None) -> int:
    """Bits of a counter of properties; 0 where the bounds are met by any text that the bits of names allow."""
    sure = sum(p.required for p in plan.named) + len(plan.witnesses)
    most = len(plan.named) if plan.extra == DEAD and not plan.witnesses else None
    if low <= sure and (high is None or (most is not None and most <= high)):
        return 0
    return max(low, high or 0, 1).bit_length() + 1


def fits(plan: Plan, low: int, high: int | None) -> bool:
    """Whether the names and the counter fit the bits of a parameter."""
    return len(plan.named) + len(plan.witnesses) + _counter_bits(plan, low, high) <= _BITS


def emit(emitter: Emitter, plan: Plan, low: int, high: int | None) -> Expr:
    """All properties with their commas, `low` to `high` of them."""
    ordered = sorted(plan.named, key=lambda p: not p.required)  # stable: required first, so that one test covers them
    needed = sum(p.required for p in ordered)
    steps: list[tuple[Expr, str, str]] = [(w, f"set_bit({i})", "") for i, w in enumerate(plan.witnesses)]
    offset = len(steps)
    steps += [(p.pair, f"set_bit({i})", f"bit_clear({i})") for i, p in enumerate(ordered, offset)]
    if plan.extra != DEAD:
        steps.append((plan.extra, "_", ""))
    if high == 0 or not steps:
        return EPSILON if not offset + needed and not low else DEAD
    first, more = emitter.fresh("p"), emitter.fresh("p")
    width = _counter_bits(plan, low, high)
    counter = f"[{offset + len(ordered)}:{offset + len(ordered) + width}]"
    after = more
    if width:
        after = emitter.fresh("p")
        emitter.out.rules[after] = Ref(more, f"incr({counter})")
        emitter.out.parametric.add(after)
    done = [f"is_ones([0:{offset + needed}])"] if offset + needed else []
    done += [f"ge({counter}, {low})"] if width and low else []
    room = [f"lt({counter}, {high})"] if width and high is not None else []
    options = [(seq(body, Ref(after, change)), _all([test, *room])) for body, change, test in steps]
    begin = [(EPSILON, "")] if not offset + needed and not low else []
    begin += options
    emitter.out.rules[first] = Or(tuple(o for o, _ in begin), tuple(t for _, t in begin))
    emitter.out.rules[more] = Or(
        (EPSILON, *(seq(COMMA, o) for o, _ in options)), (_all(done), *(t for _, t in options))
    )
    emitter.out.parametric |= {first, more}
    return Ref(first, "0x0")


def _all(tests: list[str]) -> str:
    tests = [t for t in tests if t]
    found = tests.pop() if tests else ""
    for test in reversed(tests):
        found = f"and({test}, {found})"
    return found
