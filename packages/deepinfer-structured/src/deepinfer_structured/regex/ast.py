"""Regular languages over code points: immutable nodes and constructors that simplify."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from deepinfer_structured.regex.charset import ALL, Ranges


@dataclass(frozen=True, slots=True)
class Chars:
    """One character out of a set."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Cat:
    """Parts in sequence; no parts is the empty string."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """One of the options; no options is the empty language."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`low` to `high` copies; `high` None is unbounded."""

    body: Node
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Both:
    """What is in every one of the languages."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Not:
    """All strings outside the language."""

    body: Node


@dataclass(frozen=True, slots=True)
class Assert:
    """A zero-width condition. Only patterns hold it, languages do not.

    `kind` is "^", "$", "b" (word boundary), "B", or a look-around "=", "!", "<=", "<!" with its body.
    """

    kind: Literal["^", "$", "b", "B", "=", "!", "<=", "<!"]
    body: Node | None = None


Node: TypeAlias = Chars | Cat | Alt | Repeat | Both | Not | Assert

EMPTY = Cat(())
NEVER = Alt(())
ANY_CHAR = Chars(ALL)
ANY = Repeat(ANY_CHAR, 0, None)


def chars(ranges: Ranges) -> Node:
    return Chars(ranges) if ranges else NEVER


def literal(text: str) -> Node:
    return cat(*(Chars(((ord(c), ord(c)),)) for c in text))


def cat(*parts: Node) -> Node:
    flat: list[Node] = []
    for part in parts:
        if part == NEVER:
            return NEVER
        pieces = part.parts if isinstance(part, Cat) else (part,)
        for piece in pieces:
            if piece == ANY and flat:
                # any text takes what a repetition beside it could take in excess of its least count
                flat[-1:] = _least(flat[-1])
            elif flat and flat[-1] == ANY:
                for kept in _least(piece):
                    flat.append(kept)
                continue
            if not (piece == ANY and flat and flat[-1] == ANY):
                flat.append(piece)
    return flat[0] if len(flat) == 1 else Cat(tuple(flat))


def _least(node: Node) -> list[Node]:
    """A repetition of single characters cut to its least count."""
    if not isinstance(node, Repeat) or not isinstance(node.body, Chars) or node == ANY:
        return [node]
    return [repeat(node.body, node.low, node.low)] if node.low else []


def alt(*options: Node) -> Node:
    flat: dict[Node, None] = {}
    for option in options:
        for piece in option.options if isinstance(option, Alt) else (option,):
            flat[piece] = None
    if ANY in flat:
        return ANY
    return next(iter(flat)) if len(flat) == 1 else Alt(tuple(flat))


def repeat(body: Node, low: int, high: int | None) -> Node:
    if high == 0 or body == EMPTY:
        return EMPTY
    if body == NEVER:
        return NEVER if low else EMPTY
    if (low, high) == (1, 1):
        return body
    return Repeat(body, low, high)


def both(*parts: Node) -> Node:
    flat: dict[Node, None] = {}
    for part in parts:
        for piece in part.parts if isinstance(part, Both) else (part,):
            if piece != ANY:
                flat[piece] = None
    if NEVER in flat:
        return NEVER
    if EMPTY in flat:
        rest = [p for p in flat if p != EMPTY]
        if all(nullable(p) for p in rest):
            return EMPTY
        return NEVER
    if not flat:
        return ANY
    return next(iter(flat)) if len(flat) == 1 else Both(tuple(flat))


def complement(body: Node) -> Node:
    if isinstance(body, Not):
        return body.body
    if body == ANY:
        return NEVER
    if body == NEVER:
        return ANY
    return Not(body)


def nullable(node: Node) -> bool:
    """Whether the language holds the empty string. `node` has no assertions."""
    match node:
        case Chars():
            return False
        case Cat(parts) | Both(parts):
            return all(nullable(p) for p in parts)
        case Alt(options):
            return any(nullable(o) for o in options)
        case Repeat(body, low, _):
            return low == 0 or nullable(body)
        case Not(body):
            return not nullable(body)
        case Assert():
            raise TypeError("a pattern is not a language")


def has_assertion(node: Node) -> bool:
    match node:
        case Assert():
            return True
        case Cat(parts) | Both(parts):
            return any(has_assertion(p) for p in parts)
        case Alt(options):
            return any(has_assertion(o) for o in options)
        case Repeat(body, _, _) | Not(body):
            return has_assertion(body)
    return False


def is_plain(node: Node) -> bool:
    """Whether the language can be written without intersection and complement."""
    match node:
        case Cat(parts):
            return all(is_plain(p) for p in parts)
        case Alt(options):
            return all(is_plain(o) for o in options)
        case Repeat(body, _, _):
            return is_plain(body)
        case Chars():
            return True
    return False
