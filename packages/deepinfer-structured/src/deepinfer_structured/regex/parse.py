"""The ECMAScript regular expression syntax (with the `u` flag's classes and the leniency of Annex B)."""

from __future__ import annotations

from deepinfer_structured.errors import InvalidSpec
from deepinfer_structured.regex import charset
from deepinfer_structured.regex.ast import NEVER, Assert, Chars, Node, alt, cat, chars, repeat

_CONTROL = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D, "a": 0x07}
_CLASSES = {"d": charset.DIGIT, "w": charset.WORD, "s": charset.SPACE}
_MAX_REPEAT = 100_000_000
_MAX_DEPTH = 100


class UnsupportedPattern(InvalidSpec):
    """A pattern feature that is not regular (back references) or has no equivalent here."""


def parse(pattern: str) -> Node:
    """Parse a pattern; the result may hold `Assert` nodes.

    Raises:
        InvalidSpec: the pattern is malformed.
        UnsupportedPattern: it uses a feature that no regular language expresses.
    """
    parser = _Parser(pattern)
    node = parser.alternatives()
    if parser.at < len(pattern):
        raise parser.error("unmatched ')'")
    return node


class _Parser:
    def __init__(self, pattern: str) -> None:
        self.text, self.at, self.fold, self.depth, self.dot_all = pattern, 0, False, 0, False

    def error(self, what: str) -> InvalidSpec:
        return InvalidSpec(f"bad regular expression {self.text[:200]!r} at {self.at}: {what}")

    def unsupported(self, what: str) -> UnsupportedPattern:
        return UnsupportedPattern(f"regular expression {self.text[:200]!r} at {self.at}: {what} is not supported")

    def peek(self, token: str) -> bool:
        return self.text.startswith(token, self.at)

    def take(self, token: str) -> bool:
        if self.peek(token):
            self.at += len(token)
            return True
        return False

    def next(self) -> str:
        if self.at >= len(self.text):
            raise self.error("unexpected end")
        self.at += 1
        return self.text[self.at - 1]

    def alternatives(self) -> Node:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise self.error(f"nested deeper than {_MAX_DEPTH}")
        options = [self.sequence()]
        while self.take("|"):
            options.append(self.sequence())
        self.depth -= 1
        return alt(*options)

    def sequence(self) -> Node:
        parts: list[Node] = []
        while self.at < len(self.text) and not self.peek("|") and not self.peek(")"):
            parts.append(self.quantified())
        return cat(*parts)

    def quantified(self) -> Node:
        atom = self.atom()
        while (bounds := self.quantifier()) is not None:
            low, high = bounds
            if self.take("+"):
                raise self.unsupported("a possessive quantifier")
            self.take("?")  # lazy or greedy, the language is the same
            if isinstance(atom, Assert):
                atom = atom if low else cat()
            else:
                atom = repeat(atom, low, high)
        return atom

    def quantifier(self) -> tuple[int, int | None] | None:
        for token, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self.take(token):
                return bounds
        return self.braces()

    def braces(self) -> tuple[int, int | None] | None:
        if not self.peek("{"):
            return None
        end = self.text.find("}", self.at)
        low, comma, high = self.text[self.at + 1 : end].partition(",") if end > 0 else ("", "", "")
        if not low.isascii() or not low.isdigit() or (high and not (high.isascii() and high.isdigit())):
            return None  # a literal brace
        self.at = end + 1
        bounds = (int(low), int(high) if high else None) if comma else (int(low), int(low))
        if max(bounds[0], bounds[1] or 0) > _MAX_REPEAT:
            raise self.error(f"repetition above {_MAX_REPEAT}")
        if bounds[1] is not None and bounds[0] > bounds[1]:
            raise self.error("repetition bounds out of order")
        return bounds

    def atom(self) -> Node:
        char = self.next()
        match char:
            case "^" | "$":
                return Assert(char)
            case ".":
                return Chars(charset.ALL if self.dot_all else charset.invert(charset.LINE_END))
            case "[":
                return self.bracket()
            case "(":
                return self.group()
            case "\\":
                return self.escape()
            case "*" | "+" | "?":
                raise self.error("nothing to repeat")
        return self.char(ord(char))

    def char(self, code: int) -> Node:
        if 0xD800 <= code <= 0xDFFF:
            raise self.unsupported("a lone surrogate")
        ranges = ((code, code),)
        return chars(charset.fold_case(ranges) if self.fold else ranges)

    def group(self) -> Node:
        fold, dot_all = self.fold, self.dot_all
        kind = ""
        for token in ("?:", "?=", "?!", "?<=", "?<!", "?P<", "?<"):
            if self.take(token):
                kind = token
                break
        if not kind and self.peek("?"):
            return self.inline_flags()
        if kind in ("?P<", "?<"):
            end = self.text.find(">", self.at)
            if end < 0:
                raise self.error("unterminated group name")
            self.at = end + 1
        body = self.alternatives()
        if not self.take(")"):
            raise self.error("missing ')'")
        self.fold, self.dot_all = fold, dot_all
        if kind in ("?=", "?!", "?<=", "?<!"):
            return Assert(kind[1:], body)  # pyrefly: ignore
        return body

    def inline_flags(self) -> Node:
        end = self.at + 1
        while end < len(self.text) and self.text[end] in "imsux":
            end += 1
        flags = self.text[self.at + 1 : end]
        if not flags or "x" in flags or "m" in flags or not self.text.startswith((")", ":"), end):
            raise self.unsupported("this kind of group")
        fold, dot_all = self.fold, self.dot_all
        self.fold, self.dot_all = self.fold or "i" in flags, self.dot_all or "s" in flags
        self.at = end + 1
        if self.text[end] == ")":
            return cat()
        body = self.alternatives()
        if not self.take(")"):
            raise self.error("missing ')'")
        self.fold, self.dot_all = fold, dot_all
        return body

    def escape(self) -> Node:
        char = self.next()
        if char in "bB":
            return Assert(char)  # pyrefly: ignore
        if char in "AZz":
            return Assert("^" if char == "A" else "$")
        if char in "123456789" or char == "k":
            raise self.unsupported("a back reference")
        ranges = self.class_escape(char)
        if ranges is not None:
            return chars(ranges)
        return self.char(self.code_escape(char))

    def class_escape(self, char: str) -> charset.Ranges | None:
        if char.lower() in _CLASSES:
            ranges = _CLASSES[char.lower()]
            return charset.invert(ranges) if char.isupper() else ranges
        if char in "pP" and (self.peek("{") or self.text[self.at : self.at + 1].isalpha()):
            return self.property(char == "P")
        return None

    def property(self, negated: bool) -> charset.Ranges:
        if self.take("{"):
            end = self.text.find("}", self.at)
            if end < 0:
                raise self.error("unterminated property")
            name, self.at = self.text[self.at : end], end + 1
        else:
            name = self.next()
        for prefix in ("General_Category=", "gc="):
            name = name.removeprefix(prefix)
        ranges = charset.category(name)
        if ranges is None:
            raise self.unsupported(f"the character property {name!r}")
        return charset.invert(ranges) if negated else ranges

    def code_escape(self, char: str) -> int:
        if char in _CONTROL:
            return _CONTROL[char]
        if char == "0":
            return 0
        if char == "c" and self.text[self.at : self.at + 1].isalpha():
            return ord(self.next()) % 32
        if char == "x" and (code := self.hex(2)) is not None:
            return code
        if char == "u":
            return self.unicode_escape()
        return ord(char)

    def unicode_escape(self) -> int:
        if self.take("{"):
            end = self.text.find("}", self.at)
            digits, self.at = self.text[self.at : max(end, self.at)], end + 1
            try:
                code = int(digits, 16)
            except ValueError:
                raise self.error("bad code point") from None
            if code > 0x10FFFF:
                raise self.error("code point above 10FFFF")
            return code
        high = self.hex(4)
        if high is None:
            return ord("u")
        if 0xD800 <= high < 0xDC00 and self.take("\\u"):
            low = self.hex(4)
            if low is not None and 0xDC00 <= low < 0xE000:
                return 0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00)
            raise self.unsupported("a lone surrogate")
        return high

    def hex(self, width: int) -> int | None:
        digits = self.text[self.at : self.at + width]
        if len(digits) < width or any(d not in "0123456789abcdefABCDEF" for d in digits):
            return None
        self.at += width
        return int(digits, 16)

    def bracket(self) -> Node:
        negated = self.take("^")
        ranges: list[tuple[int, int]] = []
        while not self.take("]"):
            low = self.bracket_item()
            if isinstance(low, int) and self.peek("-") and not self.peek("-]"):
                self.at += 1
                high = self.bracket_item()
                if isinstance(high, int):
                    if low > high:
                        raise self.error("character range out of order")
                    ranges.append((low, high))
                    continue
                ranges += [(low, low), (0x2D, 0x2D), *high]
            elif isinstance(low, int):
                ranges.append((low, low))
            else:
                ranges += low
        found = charset.normalise(ranges)
        if self.fold:
            found = charset.fold_case(found)
        if negated:
            found = charset.invert(found)
        return chars(found) if found else NEVER

    def bracket_item(self) -> int | charset.Ranges:
        char = self.next()
        if char != "\\":
            return ord(char)
        char = self.next()
        if char == "b":
            return 0x08
        ranges = self.class_escape(char)
        return self.code_escape(char) if ranges is None else ranges
