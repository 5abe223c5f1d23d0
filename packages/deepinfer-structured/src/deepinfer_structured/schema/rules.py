"""A small grammar: rules made of terminals, sequences, choices and repetitions; printed as Lark, useless parts removed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Term:
    """Text of a terminal, a string literal, or an inline `%json` schema."""

    text: str


@dataclass(frozen=True, slots=True)
class Ref:
    """A rule by name, with an optional parameter such as `set_bit(3)`."""

    name: str
    parameter: str = ""


@dataclass(frozen=True, slots=True)
class Seq:
    parts: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Or:
    """Options; `conditions[i]` (when given) guards option i by the rule's parameter."""

    options: tuple[Expr, ...]
    conditions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Many:
    """`low` to `high` copies; None is unbounded."""

    body: Expr
    low: int
    high: int | None


Expr: TypeAlias = Term | Ref | Seq | Or | Many
EPSILON = Seq(())
DEAD = Or(())
COMMA, COLON = Term('","'), Term('":"')


def seq(*parts: Expr) -> Expr:
    flat: list[Expr] = []
    for part in parts:
        flat += part.parts if isinstance(part, Seq) else (part,)
    if DEAD in flat:
        return DEAD
    return flat[0] if len(flat) == 1 else Seq(tuple(flat))


def choice(*options: Expr) -> Expr:
    unique = tuple(dict.fromkeys(o for o in options if o != DEAD))
    return unique[0] if len(unique) == 1 else Or(unique)


def many(body: Expr, low: int, high: int | None) -> Expr:
    """`low` to `high` copies of a body."""
    return EPSILON if high == 0 else Many(body, low, high)


def maybe(body: Expr) -> Expr:
    return Many(body, 0, 1)


class RuleSet:
    """Named rules and terminals; `rules` keeps the order of definition."""

    def __init__(self) -> None:
        self.rules: dict[str, Expr] = {}
        self.terminals: dict[str, str] = {}
        self.parametric: set[str] = set()

    def prune(self) -> None:
        """Remove every option that can never be completed, and every rule that cannot be reached from `start`."""
        productive = self._productive()
        self.rules = {n: _pruned(b, productive) for n, b in self.rules.items() if n in productive}
        reached: set[str] = set()
        todo = ["start"] if "start" in self.rules else []
        while todo:
            name = todo.pop()
            if name not in reached:
                reached.add(name)
                todo += _references(self.rules[name])
        self.rules = {n: b for n, b in self.rules.items() if n in reached}
        while idle := {n for n in self.parametric if n not in self.rules or not self._uses_parameter(self.rules[n])}:
            self.parametric -= idle

    def _productive(self) -> set[str]:
        """Rules that can be completed. A rule is looked at again when one that it refers to turns out to be."""
        users: dict[str, list[str]] = {}
        for name, body in self.rules.items():
            for other in set(_references(body)):
                users.setdefault(other, []).append(name)
        productive: set[str] = set()
        todo = list(self.rules)
        while todo:
            name = todo.pop()
            if name not in productive and _productive(self.rules[name], productive):
                productive.add(name)
                todo += users.get(name, ())
        return productive

    def _uses_parameter(self, expr: Expr) -> bool:
        match expr:
            case Ref(name, parameter):
                return name in self.parametric and not parameter.startswith("0x")
            case Seq(parts):
                return any(self._uses_parameter(p) for p in parts)
            case Or(options, conditions):
                return any(conditions) or any(self._uses_parameter(o) for o in options)
            case Many(body, _, _):
                return self._uses_parameter(body)
        return False

    def lark(self) -> str:
        """The rules and terminals as Lark text."""
        lines = [
            f"{n}{'::_' if n in self.parametric else ''}: {self._print(b, top=True)}" for n, b in self.rules.items()
        ]
        used = set(re.findall(r"\b[A-Z]\w*", "\n".join(lines))) | {"FREE"}
        lines += [f"{name}: {text}" for name, text in self.terminals.items() if name in used]
        return "\n".join(lines) + "\n"

    def _print(self, expr: Expr, *, top: bool = False) -> str:
        match expr:
            case Term(text):
                return text
            case Ref(name, parameter):
                return f"{name}::{parameter}" if parameter and name in self.parametric else name
            case Seq(parts):
                return " ".join(self._print(p) for p in parts) if parts else '""'
            case Or(options, conditions):
                texts = [self._print(o) for o in options]
                if conditions:
                    texts = [
                        f"{text} %if {test}" if test else text for text, test in zip(texts, conditions, strict=True)
                    ]
                return "\n  | ".join(texts) if top else f"({' | '.join(texts)})"
            case Many(body, low, high):
                inner = self._print(body) if isinstance(body, Or) else f"({self._print(body)})"
                mark = {(0, 1): "?", (0, None): "*", (1, None): "+"}.get((low, high))
                return inner + (mark or f"{{{low},{'' if high is None else high}}}")


def size(expr: Expr) -> int:
    """Symbols of an expression."""
    match expr:
        case Seq(parts) | Or(parts, _):
            return 1 + sum(map(size, parts))
        case Many(body, _, _):
            return 1 + size(body)
    return 1


def _productive(expr: Expr, known: set[str]) -> bool:
    match expr:
        case Term():
            return True
        case Ref(name, _):
            return name in known
        case Seq(parts):
            return all(_productive(p, known) for p in parts)
        case Or(options, _):
            return any(_productive(o, known) for o in options)
        case Many(body, low, _):
            return low == 0 or _productive(body, known)


def _pruned(expr: Expr, known: set[str]) -> Expr:
    match expr:
        case Seq(parts):
            return Seq(tuple(_pruned(p, known) for p in parts))
        case Or(options, conditions):
            kept = [i for i, o in enumerate(options) if _productive(o, known)]
            return Or(
                tuple(_pruned(options[i], known) for i in kept),
                tuple(conditions[i] for i in kept) if conditions else (),
            )
        case Many(body, low, high):
            return Many(_pruned(body, known), low, high) if _productive(body, known) else EPSILON
    return expr


def _references(expr: Expr) -> list[str]:
    match expr:
        case Ref(name, _):
            return [name]
        case Seq(parts) | Or(parts, _):
            return [n for p in parts for n in _references(p)]
        case Many(body, _, _):
            return _references(body)
    return []
