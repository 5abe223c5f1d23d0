"""Languages as terminals of a Lark grammar over the raw text of a JSON string (without its quotes).

A character may be written in several ways. To keep complements right, one universe of spellings is used throughout:
printable ASCII stands for itself (`"`, `\\` and `/` escaped as usual), control characters are escaped, everything else
stands for itself or as `\\uXXXX` (a surrogate pair above U+FFFF). Terminals refer to `C` and `U` of `definitions`.
"""

from __future__ import annotations

import functools
import json

from deepinfer_structured.regex import charset
from deepinfer_structured.regex.ast import ANY, ANY_CHAR, Alt, Both, Cat, Chars, Node, Not, Repeat, is_plain

_SHORT = {0x08: "b", 0x09: "t", 0x0A: "n", 0x0C: "f", 0x0D: "r", 0x22: '\\"', 0x2F: "\\/", 0x5C: "\\\\"}
_DIRECT = charset.invert(((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C)))
_HEX = "0123456789abcdef"


def terminal(node: Node, *, raw: bool = False) -> str:
    """A terminal expression (right side of an uppercase Lark rule) for the language.

    Texts are spelled as JSON string content, or with `raw` as they are. Refers to C and U of `definitions`.
    """
    if node == ANY:
        return "U"
    if node == ANY_CHAR:
        return "C"
    if is_plain(node):
        return f"/{text}/" if (text := plain(node, raw=raw)) else '""'
    match node:
        case Repeat(_, _, 0):
            return '""'
        case Cat(parts):
            return " ".join(_atom(p, raw) for p in _group_plain(parts, Cat)) or '""'
        case Alt(options):
            return "(" + " | ".join(terminal(o, raw=raw) for o in _group_plain(options, Alt)) + ")"
        case Repeat(body, low, high):
            return f"{_atom(body, raw)}{{{low},{'' if high is None else high}}}"
        case Both(parts):
            return "(" + " & ".join(_atom(p, raw) for p in parts) + ")"
        case Not(body):
            return f"(U & ~({terminal(body, raw=raw)}))"
    raise TypeError("a pattern is not a language")


def quoted(node: Node) -> str:
    """A terminal expression for the language's texts as JSON strings, with their quotes.

    Intersections and complements are taken outside the quotes: the library then sees that most tokens continue the
    string whatever is excluded, and fills masks a hundred times faster. Refers to C, U and Q of `definitions`.
    """
    match node:
        case Both(parts):
            wanted = [quoted(p) for p in parts if not isinstance(p, Not)] or ["Q"]
            return "(" + " & ".join([*wanted, *(f"~({quoted(p.body)})" for p in parts if isinstance(p, Not))]) + ")"
        case Not(body):
            return f"(Q & ~({quoted(body)}))"
        case Alt(options) if not is_plain(node):
            return "(" + " | ".join(quoted(o) for o in _group_plain(options, Alt)) + ")"
    return "Q" if node == ANY else f'("\\"" ({terminal(node)}) "\\"")'


def definitions(*, raw: bool = False) -> str:
    """The terminals that `terminal` and `quoted` refer to: C, one character, U, any text, and Q, U in quotes."""
    strings = "" if raw else 'Q: "\\"" U "\\""\n'
    return f"C: /{plain(ANY_CHAR, raw=raw)}/\nU: /{plain(ANY, raw=raw)}/\n{strings}"


def _atom(node: Node, raw: bool) -> str:
    text = terminal(node, raw=raw)
    return text if is_plain(node) or text.startswith("(") else f"({text})"


def _group_plain(parts: tuple[Node, ...], kind: type[Cat] | type[Alt]) -> list[Node]:
    out: list[Node] = []
    run: list[Node] = []
    for part in parts:
        if is_plain(part):
            run.append(part)
            continue
        if run:
            out.append(kind(tuple(run)))
            run = []
        out.append(part)
    return [*out, kind(tuple(run))] if run else out


def plain(node: Node, *, raw: bool = False) -> str:
    """A regular expression in the syntax of the Rust regex crate, safe between slashes."""
    match node:
        case Chars(ranges):
            return _bracket(ranges) if raw else char_class(ranges)
        case Cat(parts):
            texts = ((p, plain(p, raw=raw)) for p in parts)
            return "".join(f"(?:{text})" if isinstance(p, Alt) else text for p, text in texts)
        case Alt(options):
            return "|".join(plain(o, raw=raw) for o in options) if options else r"[^\x00-\u{10FFFF}]"
        case Repeat(body, low, high):
            inner = plain(body, raw=raw)
            group = inner if _single(inner) else f"(?:{inner})"
            return group + _bounds(low, high)
    raise TypeError("not a plain language")


def _single(text: str) -> bool:
    return len(text) == 1 or (text.startswith("[") and text.find("]") == len(text) - 1)


def _bounds(low: int, high: int | None) -> str:
    short = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((low, high))
    return short or (f"{{{low},}}" if high is None else f"{{{low}}}" if low == high else f"{{{low},{high}}}")


@functools.lru_cache(maxsize=8192)
def char_class(ranges: charset.Ranges) -> str:
    """One character of the set in all its spellings."""
    options = []
    direct = charset.intersect(ranges, _DIRECT)
    if direct:
        options.append(_bracket(direct))
    short = "".join(f"|{s}" for code, s in _SHORT.items() if charset.contains(ranges, code))
    if short:
        options.append(f"\\\\(?:{short[1:]})")
    control = charset.intersect(ranges, ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)))
    wide = charset.intersect(ranges, charset.invert(((0, 0x7F),)))
    escapes = [e for low, high in (*control, *wide) for e in _escapes(low, high)]
    if escapes:
        options.append(f"\\\\u(?:{'|'.join(escapes)})")
    if not options:
        return r"[^\x00-\u{10FFFF}]"
    if len(options) == 1:
        return options[0]
    return f"(?:{'|'.join(options)})"


def _bracket(ranges: charset.Ranges) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _code(ranges[0][0])
    return "[" + "".join(_code(a) if a == b else f"{_code(a)}-{_code(b)}" for a, b in ranges) + "]"


def _code(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\x{{{code:X}}}"


def _escapes(low: int, high: int) -> list[str]:
    """The digits after `\\u` for the code points low..high."""
    out = _hex_range(f"{low:04x}", f"{min(high, 0xFFFF):04x}") if low <= 0xFFFF else []
    if high > 0xFFFF:
        first, last = _pair(max(low, 0x10000)), _pair(high)
        out += _pair_range(first, last)
    return out


def _pair(code: int) -> tuple[int, int]:
    return 0xD800 + ((code - 0x10000) >> 10), 0xDC00 + ((code - 0x10000) & 0x3FF)


def _pair_range(first: tuple[int, int], last: tuple[int, int]) -> list[str]:
    """Surrogate pairs first..last, as blocks of high halves with the low halves that they allow."""
    pieces: list[tuple[int, int, int, int]] = []
    start, end = first[0], last[0]
    if start == end:
        pieces.append((start, end, first[1], last[1]))
    else:
        if first[1] > 0xDC00:
            pieces.append((start, start, first[1], 0xDFFF))
            start += 1
        if last[1] < 0xDFFF:
            pieces.append((end, end, 0xDC00, last[1]))
            end -= 1
        if start <= end:
            pieces.append((start, end, 0xDC00, 0xDFFF))
    out = []
    for a, b, c, d in pieces:
        highs, lows = _hex_range(f"{a:04x}", f"{b:04x}"), _hex_range(f"{c:04x}", f"{d:04x}")
        out.append(f"(?:{'|'.join(highs)})\\\\u(?:{'|'.join(lows)})")
    return out


def _hex_range(low: str, high: str) -> list[str]:
    """Expressions for the equally long hexadecimal numbers low..high."""
    if low == high:
        return ["".join(_digits(d, d) for d in low)]
    same = next(i for i in range(len(low)) if low[i] != high[i])
    head = "".join(_digits(d, d) for d in low[:same])
    a, b, width = low[same:], high[same:], len(low) - same - 1
    out, first, last = [], _HEX.index(a[0]), _HEX.index(b[0])
    if set(a[1:]) - {"0"}:
        out += [head + _digits(a[0], a[0]) + rest for rest in _hex_range(a[1:], "f" * width)]
        first += 1
    if set(b[1:]) - {"f"}:
        out += [head + _digits(b[0], b[0]) + rest for rest in _hex_range("0" * width, b[1:])]
        last -= 1
    if first <= last:
        out.append(head + _digits(_HEX[first], _HEX[last]) + "[0-9a-fA-F]" * width)
    return out


def _digits(low: str, high: str) -> str:
    members = _HEX[_HEX.index(low) : _HEX.index(high) + 1]
    spans = ("0123456789", "abcdef", "ABCDEF")
    kept = ["".join(d for d in span if d.lower() in members) for span in spans]
    text = "".join(k if len(k) < 3 else f"{k[0]}-{k[-1]}" for k in kept)
    return text if len(text) == 1 else f"[{text}]"


def quoted_literal(text: str) -> str:
    """A Lark terminal expression for one JSON string with its quotes, in its usual spellings."""
    spellings = dict.fromkeys([json.dumps(text, ensure_ascii=False), json.dumps(text)])
    return " | ".join(lark_string(s) for s in spellings)


def lark_string(text: str) -> str:
    """A Lark string literal."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
