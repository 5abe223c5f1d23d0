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
        return spelled(json.loads(text.decode("utf-8", "surrogatepass")))
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
    exact = Context(prec=len(exponent) + 20, Emax=MAX_EMAX, Emin=MIN_EMIN)
    total = exact.add(Decimal(exponent.decode()), Decimal(shift))
    return b"0" if total.is_zero() else str(total).encode()


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
