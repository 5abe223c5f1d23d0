"""From a pattern to the language of the texts in which it is found: anchors, boundaries and look-arounds resolved.

A pattern is found anywhere in the text unless anchored. The walk below carries `before`, the language of everything to
the left of the current position from the start of the text, so that a condition on the left (`^`, look-behind, `\\b`)
is an intersection with `before`, and a condition on the right is an intersection with the language of what follows.
"""

from __future__ import annotations

import functools

from deepinfer_structured.regex import charset
from deepinfer_structured.regex.ast import (
    ANY,
    EMPTY,
    NEVER,
    Alt,
    Assert,
    Cat,
    Chars,
    Node,
    Repeat,
    alt,
    both,
    cat,
    complement,
    has_assertion,
    nullable,
    repeat,
)
from deepinfer_structured.regex.parse import UnsupportedPattern, parse

_WORD = Chars(charset.WORD)
_NON_WORD = Chars(charset.invert(charset.WORD))
_MAX_UNROLL = 4
_MAX_CONDITIONS = 6


@functools.lru_cache(maxsize=4096)
def language(pattern: str) -> Node:
    """The language of the texts in which an ECMAScript pattern is found.

    Raises:
        InvalidSpec: the pattern is malformed.
        UnsupportedPattern: it is not regular, or a condition stands where it cannot be resolved.
    """
    return _found(_checked(parse(pattern)))


@functools.lru_cache(maxsize=4096)
def whole(pattern: str) -> Node:
    """The language of the texts that a pattern matches from start to end."""
    return _walk(EMPTY, [Assert("^"), _checked(parse(pattern)), Assert("$")], EMPTY, anchored=True)


def _checked(pattern: Node) -> Node:
    """Refuse patterns in which conditions multiply: each doubles the text's language or more."""
    count = _conditions(pattern)
    if count > _MAX_CONDITIONS:
        raise UnsupportedPattern(f"{count} word boundaries and look-arounds in one pattern are not supported")
    return pattern


def _conditions(node: Node) -> int:
    match node:
        case Assert(kind, body):
            own = 0 if kind in ("^", "$") else 1
            return own + (_conditions(body) if body is not None else 0)
        case Cat(parts):
            return sum(map(_conditions, parts))
        case Alt(options):
            return max(map(_conditions, options), default=0)
        case Repeat(body, _, _):
            return _conditions(body)
    return 0


def _found(pattern: Node) -> Node:
    return _walk(ANY, [pattern], ANY, anchored=True)


def _walk(before: Node, items: list[Node], tail: Node, *, anchored: bool) -> Node:
    """`before` (a language), then the items (a pattern), then `tail`.

    `anchored` says that `before` starts at the start of the text, which conditions on the left need to know.
    """
    while items:
        item, items = items[0], items[1:]
        if before == NEVER:
            return NEVER
        if not has_assertion(item):
            before = cat(before, item)
            continue
        match item:
            case Cat(parts):
                items = [*parts, *items]
            case Alt(options):
                return alt(*(_walk(before, [o, *items], tail, anchored=anchored) for o in options))
            case Repeat():
                return _repeat(before, item, items, tail, anchored)
            case Assert(kind, body):
                if kind in ("$", "=", "!"):
                    return _ahead(before, item, items, tail, anchored)
                if not anchored and (kind in ("<=", "<!") or nullable(before)):
                    raise UnsupportedPattern("a condition on preceding text after a look-ahead is not supported")
                if kind in ("b", "B"):
                    return _boundary(before, kind == "b", items, tail)
                before = _behind(before, kind, body)
            case _:
                raise UnsupportedPattern("a condition inside this construct is not supported")
    return cat(before, tail)


def _behind(before: Node, kind: str, body: Node | None) -> Node:
    if kind == "^":
        return EMPTY if nullable(before) else NEVER
    assert body is not None
    ends = _walk(ANY, [body], EMPTY, anchored=True)
    return both(before, ends if kind == "<=" else complement(ends))


def _ahead(before: Node, item: Assert, items: list[Node], tail: Node, anchored: bool) -> Node:
    """`before`, then what follows restricted by a condition on the right."""
    fresh = anchored and before == EMPTY  # what follows starts the text, so left conditions may look at it
    after = _walk(EMPTY, items, tail, anchored=fresh)
    if item.kind == "$":
        return before if nullable(after) else NEVER
    assert item.body is not None
    begins = _walk(EMPTY, [item.body], ANY, anchored=fresh)
    return cat(before, both(begins if item.kind == "=" else complement(begins), after))


def _boundary(before: Node, wanted: bool, items: list[Node], tail: Node) -> Node:
    after = _walk(EMPTY, items, tail, anchored=before == EMPTY)
    left_word, right_word = cat(ANY, _WORD), cat(_WORD, ANY)
    left_other, right_other = alt(EMPTY, cat(ANY, _NON_WORD)), alt(EMPTY, cat(_NON_WORD, ANY))
    pairs = [(left_word, right_other), (left_other, right_word)]
    if not wanted:
        pairs = [(left_word, right_word), (left_other, right_other)]
    return alt(*(cat(both(before, left), both(right, after)) for left, right in pairs))


def _repeat(before: Node, item: Repeat, items: list[Node], tail: Node, anchored: bool) -> Node:
    without = _without_match(item)
    if without is not None and _ends_text(items, tail):
        return cat(before, without)
    if item.high is not None and item.high <= _MAX_UNROLL:
        counts = range(item.low, item.high + 1)
        return alt(*(_walk(before, [item.body] * n + items, tail, anchored=anchored) for n in counts))
    raise UnsupportedPattern("a condition inside a repetition is not supported")


def _ends_text(items: list[Node], tail: Node) -> bool:
    return items == [Assert("$")] or (not items and tail == EMPTY)


def _without_match(item: Repeat) -> Node | None:
    """`((?!X).)*`: text without X, the usual way to write it. None if the repetition is another one."""
    body = item.body
    if not isinstance(body, Cat) or len(body.parts) < 2 or item.high is not None or item.low > 1:
        return None
    *conditions, step = body.parts
    found: list[Node] = []
    for condition in conditions:
        if not isinstance(condition, Assert) or condition.kind != "!" or condition.body is None:
            return None
        if has_assertion(condition.body) or nullable(condition.body):
            return None
        found.append(complement(cat(ANY, condition.body, ANY)))
    return both(repeat(step, item.low, None), *found) if isinstance(step, Chars) else None
