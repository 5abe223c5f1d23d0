"""Whether a text is in a language: sets of end positions, memoised; for short texts such as names and enum values."""

from __future__ import annotations

from deepinfer_structured.regex.ast import Alt, Both, Cat, Chars, Node, Not, Repeat
from deepinfer_structured.regex.charset import contains


def matches(node: Node, text: str) -> bool:
    """Whether the whole text is in the language."""
    return len(text) in _ends(node, text, 0, {})


def _ends(node: Node, text: str, start: int, memo: dict[tuple[int, int], frozenset[int]]) -> frozenset[int]:
    key = (id(node), start)
    if key in memo:
        return memo[key]
    match node:
        case Chars(ranges):
            hit = start < len(text) and contains(ranges, ord(text[start]))
            found = {start + 1} if hit else set()
        case Cat(parts):
            found = {start}
            for part in parts:
                found = {e for s in found for e in _ends(part, text, s, memo)}
        case Alt(options):
            found = {e for o in options for e in _ends(o, text, start, memo)}
        case Both(parts):
            found = set.intersection(*(set(_ends(p, text, start, memo)) for p in parts))
        case Not(body):
            found = set(range(start, len(text) + 1)) - _ends(body, text, start, memo)
        case Repeat():
            found = _repeat_ends(node, text, start, memo)
        case _:
            raise TypeError("a pattern is not a language")
    memo[key] = frozenset(found)
    return memo[key]


def _repeat_ends(node: Repeat, text: str, start: int, memo: dict[tuple[int, int], frozenset[int]]) -> set[int]:
    current, found, count = {start}, {start} if node.low == 0 else set(), 0
    seen: set[tuple[int, ...]] = set()
    while current and (node.high is None or count < node.high):
        current = {e for s in current for e in _ends(node.body, text, s, memo)}
        count += 1
        state = tuple(sorted(current))
        if count >= node.low:
            if current <= found and node.high is None:
                break
            found |= current
        elif state in seen:
            # an empty body reaches the same positions for ever, so the lower bound is met at them
            found |= current
        seen.add(state)
        if count > len(text) + 2 and count >= node.low:
            break
    return found
