"""JSON text into a normal form, exactly and for any size: generated text may hold what no loader takes.

Nothing here recurses or turns digits into machine numbers: nesting, exponents and digits have no limit.
"""

from __future__ import annotations

import json
import re
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal

_PIECES = re.compile(rb'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|[][{},:]|[^][{},:"\s]+', re.DOTALL)
_NUMBER = re.compile(rb"(-?)(0|[1-9][0-9]*)(?:\.([0-9]+))?(?:[eE]([+-]?[0-9]+))?")
_NUMERIC = frozenset(b"-0123456789")
_SHORT = 100  # digits that `int` is given
_PLACES = 2  # digits of the exponents that are written out
_LITERALS = (b"true", b"false", b"null")


def compact(text: bytes, whole: bool = False) -> bytes:
    """JSON text, or the beginning of one, without the whitespace between its pieces and with plain numbers.

    Args:
        text: a value or its beginning.
        whole: whether a number at the end is complete; if not, it is left as it is.
    """
    pieces = _PIECES.findall(text)
    plain = pieces if whole or text[-1:].isspace() else pieces[:-1]
    return b"".join([_plain(p) if p[0] in _NUMERIC else p for p in plain] + pieces[len(plain) :])


def _plain(number: bytes) -> bytes:
    """A number without exponent and idle zeros where it is not too long so."""
    digits, _, power = (scalar(number) or b"").partition(b"e")
    if not power:
        return digits or number
    sign, digits, shift = digits[: digits[:1] == b"-"], digits.lstrip(b"-"), power.decode()
    if len(shift) > _PLACES or abs(int(shift)) > 10**_PLACES:
        return number
    if int(shift) >= 0:
        return sign + digits + b"0" * int(shift)
    digits = digits.rjust(1 - int(shift), b"0")
    return sign + digits[: int(shift)] + b"." + digits[int(shift) :]


def spelled(name: str) -> bytes:
    """A string as text: the one spelling without `\\u` and `\\/`."""
    return json.dumps(name, ensure_ascii=False).encode("utf-8", "surrogatepass")


def scalar(text: bytes) -> bytes | None:
    """The normal form of a number, literal or string; None if the text is none, or not a whole one.

    A number is its digits without zeros at either end, and an exponent of ten: 10, 1e1 and 10.0 are `1e1`.
    """
    if text[:1] == b'"':
        return spelled(json.loads(text.decode("utf-8", "surrogatepass"))) if b"\\" in text else text
    if text in _LITERALS:
        return text
    found = _NUMBER.fullmatch(text)
    if found is None:
        return None
    sign, whole, part, exponent = (group or b"" for group in found.groups())
    digits = (whole + part).lstrip(b"0")
    kept = digits.rstrip(b"0")
    if not kept:
        return b"0"
    shift = len(digits) - len(kept) - len(part)
    return sign + kept + b"e" + _sum(exponent or b"0", shift)


def _sum(exponent: bytes, shift: int) -> bytes:
    """An exponent plus `shift`, in decimal digits. (`int` refuses long texts.)"""
    if len(exponent) < _SHORT:
        return b"%d" % (int(exponent) + shift)
    exact = Context(prec=len(exponent) + 20, Emax=MAX_EMAX, Emin=MIN_EMIN)
    total = exact.add(Decimal(exponent.decode()), Decimal(shift))
    return b"0" if total.is_zero() else str(total).encode()


def written(text: bytes) -> tuple[bytes, bytes]:
    """The normal form of a value and its compact text."""
    if text[:1] in (b"[", b"{"):
        return normal(text), compact(text, whole=True)
    value = scalar(text)
    assert value is not None, text
    return value, _plain(text) if text[0] in _NUMERIC else value


def completions(number: bytes, value: bytes, longest: int) -> list[bytes]:
    """All texts of 1 to `longest` digits that, written after `number`, make it equal to a value.

    Args:
        number: the beginning of a number; if it has an exponent, its digits are not all zero.
        value: a normal form.
    """
    if value[0] not in _NUMERIC or (number and number[0] not in _NUMERIC):
        return []
    digits, _, shift = value.partition(b"e")
    if len(shift) > _SHORT:
        return []  # no text of usual length reaches it
    mantissa, power, exponent = number.replace(b"E", b"e").partition(b"e")
    if power:
        return _exponents(mantissa, exponent, digits, int(shift or 0), longest)
    sign, places, most = number[: number[:1] == b"-"], int(shift or 0), len(number) + longest
    if digits[:1] == b"-" or value == b"0":
        sign, digits = (sign, digits) if value == b"0" else (b"-", digits[1:])
    else:
        sign = b""
    if abs(places) + len(digits) > most + 1 or (places < 0 and b"." not in number):
        return []
    whole, part = (digits + b"0" * places, b"") if places >= 0 else _split(digits, -places)
    if b"." not in number:
        text = sign + whole
        return [text[len(number) :]] if text.startswith(number) and len(number) < len(text) <= most else []
    text = sign + whole + b"." + part
    least, text = max(len(text), len(number) + 1), text.ljust(most, b"0")
    return [text[len(number) : end] for end in range(least, most + 1)] if text.startswith(number) else []


def _split(digits: bytes, places: int) -> tuple[bytes, bytes]:
    padded = digits.rjust(places + 1, b"0")
    return padded[:-places], padded[-places:]


def _exponents(mantissa: bytes, exponent: bytes, digits: bytes, shift: int, longest: int) -> list[bytes]:
    found = scalar(mantissa)
    own, _, places = (found or b"").partition(b"e")
    if own != digits or not places:
        return []
    missing = shift - int(places)
    sign, begun = exponent[: exponent[:1] in (b"+", b"-")], exponent.lstrip(b"+-")
    if (missing < 0) != (sign == b"-") and missing:
        return []
    target = b"%d" % abs(missing)
    texts = (b"0" * zeros + target for zeros in range(len(begun) + longest))
    return [t[len(begun) :] for t in texts if t.startswith(begun) and 0 < len(t) - len(begun) <= longest]


def normal(text: bytes) -> bytes:
    """The normal form of a value, equal for values that JSON Schema calls equal (1 and 1.0; objects in any order)."""
    stack: list[list[bytes]] = [[]]
    for piece in _PIECES.findall(text):
        if piece in b"[{":
            stack.append([])
        elif piece == b"]":
            items = stack.pop()
            stack[-1].append(b"[" + b",".join(items) + b"]")
        elif piece == b"}":
            items = stack.pop()
            members = sorted(dict(zip(items[::2], items[1::2], strict=True)).items())
            stack[-1].append(b"{" + b",".join(k + b":" + v for k, v in members) + b"}")
        elif piece not in b",:":
            value = scalar(piece)
            assert value is not None, piece
            stack[-1].append(value)
    return stack[0][0]
