"""The texts of a language that has few."""

from __future__ import annotations

from itertools import product

from deepinfer_structured.regex.ast import ANY, Alt, Both, Cat, Chars, Node, Repeat
from deepinfer_structured.regex.match import matches


def texts(node: Node, limit: int) -> list[str] | None:
    """All texts of a language, without repetition; None if it has, or seems to have, more than `limit`."""
    found = _texts(node, limit)
    return None if found is None else list(found)


def _texts(node: Node, limit: int) -> dict[str, None] | None:
    match node:
        case Chars(ranges):
            if sum(high - low + 1 for low, high in ranges) > limit:
                return None
            return dict.fromkeys(chr(code) for low, high in ranges for code in range(low, high + 1))
        case Cat(parts):
            return _sequence(parts, limit)
        case Alt(options):
            return _union([_texts(option, limit) for option in options], limit)
        case Repeat(body, low, high) if high is not None and high <= limit:
            return _union([_sequence((body,) * count, limit) for count in range(low, high + 1)], limit)
        case Both(parts):
            for part in parts:
                few = _texts(part, 4 * limit)
                if few is not None:
                    kept = {t: None for t in few if all(matches(p, t) for p in parts)}
                    return kept if len(kept) <= limit else None
    return None


def _sequence(parts: tuple[Node, ...], limit: int) -> dict[str, None] | None:
    found: dict[str, None] = {"": None}
    for part in parts:
        more = _texts(part, limit) if part != ANY else None
        if more is None or len(found) * len(more) > limit * limit:
            return None
        found = {a + b: None for a, b in product(found, more)}
        if len(found) > limit:
            return None
    return found


def _union(parts: list[dict[str, None] | None], limit: int) -> dict[str, None] | None:
    found: dict[str, None] = {}
    for part in parts:
        if part is None:
            return None
        found |= part
    return found if len(found) <= limit else None
