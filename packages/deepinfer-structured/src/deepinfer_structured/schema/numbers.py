"""Numbers within bounds as terminals of a Lark grammar."""

from __future__ import annotations

import functools
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal, localcontext
from fractions import Fraction

from deepinfer_structured.schema.cases import Number
from deepinfer_structured.schema.values import dumps, is_integer

_INT = r"(?:0|[1-9][0-9]*)"
_ANY_NUMBER = rf"/-?{_INT}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?/"
_FRACTIONAL = rf"/-?{_INT}\.[0-9]*[1-9][0-9]*/"
_MAX_MODULUS = 13
_MAX_LISTED = 2000
_MAX_JSON_MODULUS = 10_000
_EXACT_DIGITS = 15
_POWERS = 300  # exponents of bounded numbers: 64-bit floats take 1e-400 for 0, whatever exclusiveMinimum was
_PREC = 2000


class Inexpressible(Exception):  # noqa: N818
    """A combination of number constraints that no terminal here expresses."""


def terminal(case: Number) -> str:
    """A terminal expression for the numbers of a case; "" if there are none.

    Raises:
        Inexpressible: `multipleOf` with a large modulus beside what only terminals can do; see `as_json`.
    """
    pieces = [
        p
        for low, low_open, high, high_open in _intervals(case)
        if (p := _interval(case, low, low_open, high, high_open))
    ]
    if not pieces:
        return ""
    text = " | ".join(pieces)
    conditions = [_multiple(case.multiple, case.integer)] if case.multiple is not None else []
    conditions += [_non_multiple(m) for m in case.non_multiples]
    if not conditions:
        return text
    return f"({text}) & " + " & ".join(f"({c})" for c in conditions)


def listed(case: Number) -> list[Fraction] | None:
    """All numbers of a case, if they are few."""
    step = Fraction(1) if case.integer and case.multiple is None else case.multiple
    if step is None or case.low is None or case.high is None or not _is_decimal(step):
        return None
    first, last = -(-Fraction(case.low) // step), Fraction(case.high) // step
    if last - first > _MAX_LISTED:
        return None
    return [k * step for k in range(first, last + 1)]


def as_json(case: Number) -> str | None:
    """The case as a JSON schema that llguidance enforces, or None if it has more than bounds and one multiple."""
    if case.non_multiples or case.holes or case.integer is False or case.multiple is None:
        return None
    if not all(bound is None or _is_exact(bound) for bound in (case.low, case.high)):
        return None  # the library would round it
    fraction = case.multiple
    if fraction.numerator > _MAX_JSON_MODULUS:
        return None  # the library's automaton has a state for each remainder
    if case.integer or not _is_decimal(fraction):
        parts = ['"type":"integer"', f'"multipleOf":{fraction.numerator}']
    else:
        parts = ['"type":"number"', f'"multipleOf":{plain(fraction)}']
    if case.low is not None:
        parts.append(f'"{"exclusiveMinimum" if case.low_open else "minimum"}":{dumps(case.low)}')
    if case.high is not None:
        parts.append(f'"{"exclusiveMaximum" if case.high_open else "maximum"}":{dumps(case.high)}')
    return "{" + ",".join(parts) + "}"


def _is_exact(bound: Decimal) -> bool:
    """Whether a 64-bit float is sure to tell a bound from all others of as many digits."""
    return abs(bound) < 10**_EXACT_DIGITS and len(bound.normalize().as_tuple().digits) <= _EXACT_DIGITS


def _is_decimal(value: Fraction) -> bool:
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


def plain(value: Fraction) -> str:
    """A decimal fraction without exponent."""
    with localcontext() as context:
        context.prec = _PREC
        return f"{Decimal(value.numerator) / Decimal(value.denominator):f}"


def _intervals(case: Number) -> list[tuple[Decimal | None, bool, Decimal | None, bool]]:
    """The bounds, split at the excluded values."""
    out = [(case.low, case.low_open, case.high, case.high_open)]
    for hole in sorted(case.holes):
        low, low_open, high, high_open = out.pop()
        if (low is not None and hole < low) or (high is not None and hole > high):
            out.append((low, low_open, high, high_open))
        else:
            out += [(low, low_open, Decimal(hole), True), (Decimal(hole), True, high, high_open)]
    return out


def _interval(case: Number, low: Decimal | None, low_open: bool, high: Decimal | None, high_open: bool) -> str:
    if Number(low, low_open, high, high_open).empty():
        return ""
    if case.integer:
        return _integers(_ceil(low, low_open), _floor(high, high_open))
    text = _decimals(low, low_open, high, high_open)
    return f"({text}) & {_FRACTIONAL}" if case.integer is False and text else text


def _ceil(value: Decimal | None, is_open: bool) -> int | None:
    if value is None:
        return None
    found = int(Decimal(value).to_integral_value(ROUND_CEILING))
    return found + 1 if is_open and is_integer(value) else found


def _floor(value: Decimal | None, is_open: bool) -> int | None:
    if value is None:
        return None
    found = int(Decimal(value).to_integral_value(ROUND_FLOOR))
    return found - 1 if is_open and is_integer(value) else found


def _integers(low: int | None, high: int | None) -> str:
    if low is not None and high is not None and low > high:
        return ""
    options = []
    if high is None or high >= 0:
        options.append(_naturals(max(0, low or 0), high))
    if low is None or low <= 0:
        start = 0 if high is None or high >= 0 else -high
        options.append(f"-(?:{_naturals(start, None if low is None else -low)})")
    return f"/{'|'.join(options)}/"


def _naturals(low: int, high: int | None) -> str:
    """Natural numbers low..high without leading zeros."""
    if high is None:
        width = len(str(low))
        longer = rf"[1-9][0-9]{{{width},}}"
        return _INT if low == 0 else "|".join([*_same_width(str(low), "9" * width), longer])
    out = []
    for width in range(len(str(low)), len(str(high)) + 1):
        first = max(low, 10 ** (width - 1) if width > 1 else 0)
        out += _same_width(str(first), str(min(high, 10**width - 1)))
    return "|".join(out)


def _same_width(low: str, high: str) -> list[str]:
    """Digit strings of one width between two digit strings."""
    if low == high:
        return [low]
    same = next(i for i in range(len(low)) if low[i] != high[i])
    head, a, b = low[:same], low[same:], high[same:]
    rest = len(a) - 1
    any_rest = f"[0-9]{{{rest}}}" if rest else ""
    if set(a[1:]) <= {"0"} and set(b[1:]) <= {"9"}:
        return [f"{head}{_digit(a[0], b[0])}{any_rest}"]
    out = [f"{head}{a[0]}{tail}" for tail in _same_width(a[1:], "9" * rest)]
    if int(b[0]) - int(a[0]) > 1:
        out.append(f"{head}{_digit(str(int(a[0]) + 1), str(int(b[0]) - 1))}{any_rest}")
    return out + [f"{head}{b[0]}{tail}" for tail in _same_width("0" * rest, b[1:])]


def _digit(low: str, high: str) -> str:
    return low if low == high else f"[{low}-{high}]"


def _decimals(low: Decimal | None, low_open: bool, high: Decimal | None, high_open: bool) -> str:
    if low is None and high is None:
        return _ANY_NUMBER
    options = []
    if high is None or high >= 0:
        found = _magnitudes(
            *((low, low_open) if low is not None and low > 0 else (_zero(low), low_open and low == 0)), high, high_open
        )
        options += [found] if found else []
    if low is None or low <= 0:
        start, start_open = (
            (-high, high_open) if high is not None and high < 0 else (Decimal(0), high == 0 and high_open)
        )
        found = _magnitudes(start, start_open, None if low is None else -low, low_open)
        options += [f'"-" ({found})'] if found else []
    return " | ".join(options)


def _zero(_: Decimal | None) -> Decimal:
    return Decimal(0)


def _magnitudes(low: Decimal, low_open: bool, high: Decimal | None, high_open: bool) -> str:
    """Unsigned numbers between two bounds: plain decimals, and scientific ones with one digit before the point."""
    if high is not None and (low > high or (low == high and (low_open or high_open))):
        return ""
    parts = []
    if low > 0 or low_open:
        whole, fraction = _split(low)
        parts.append(f"/{_at_least(_naturals(whole + 1, None), whole, fraction, low_open)}/")
    if high is not None:
        whole, fraction = _split(high)
        parts.append(f"/{_at_most(_naturals(0, whole - 1) if whole else '', whole, fraction, high_open)}/")
    if not parts:
        plain_part = rf"/{_INT}(?:\.[0-9]+)?/"
    else:
        plain_part = parts[0] if len(parts) == 1 else f"({' & '.join(parts)})"
    return " | ".join([plain_part, *_scientific(low, low_open, high, high_open)])


def _scientific(low: Decimal, low_open: bool, high: Decimal | None, high_open: bool) -> list[str]:
    """Numbers above zero written `d.ddde+x`."""
    if high is not None and high == 0:
        return []
    first = low.adjusted() if low > 0 else None
    last = high.adjusted() if high is not None else None
    any_mantissa, pieces = r"/[1-9](?:\.[0-9]+)?/", []
    from_low = _mantissa_from(low, low_open) if low > 0 else any_mantissa
    to_high = _mantissa_to(high, high_open) if high is not None else any_mantissa
    if first is not None and first == last:
        return [f"({from_low} & {to_high}) {_exponent(first, first)}"]
    if first is not None:
        pieces.append(f"{from_low} {_exponent(first, first)}")
    if last is not None:
        pieces.append(f"{to_high} {_exponent(last, last)}")
    start, end = -_POWERS if first is None else first + 1, _POWERS if last is None else last - 1
    if start <= end:
        pieces.append(f"{any_mantissa} {_exponent(start, end)}")
    return pieces


def _mantissa_from(value: Decimal, is_open: bool) -> str:
    whole, fraction = _split(_scaled(value))
    more = _digit(str(whole + 1), "9") if whole < 9 else ""
    return f"/{_at_least(more, whole, fraction, is_open)}/"


def _mantissa_to(value: Decimal, is_open: bool) -> str:
    whole, fraction = _split(_scaled(value))
    less = _digit("1", str(whole - 1)) if whole > 1 else ""
    return f"/{_at_most(less, whole, fraction, is_open)}/"


def _scaled(value: Decimal) -> Decimal:
    """The value with one digit before the point."""
    sign, digits, _ = value.as_tuple()
    return Decimal((sign, digits, 1 - len(digits)))


def _exponent(low: int | None, high: int | None) -> str:
    """`e` and an exponent low..high, with any sign spelling and leading zeros."""
    options = []
    if high is None or high >= 0:
        options.append(rf"\+?0*(?:{_naturals(max(0, low or 0), high)})")
    if low is None or low <= 0:
        start = 0 if high is None or high >= 0 else -high
        options.append(f"-0*(?:{_naturals(start, None if low is None else -low)})")
    return f"/[eE](?:{'|'.join(options)})/"


def _split(value: Decimal) -> tuple[int, str]:
    whole, _, fraction = f"{value:f}".partition(".")
    return int(whole), fraction.rstrip("0")


def _at_least(more: str, whole: int, fraction: str, is_open: bool) -> str:
    """Decimals of at least `whole.fraction`; `more` are the larger integer parts."""
    options = [rf"(?:{more})(?:\.[0-9]+)?"] if more else []
    tail = [rf"{fraction[:i]}{_digit(str(int(d) + 1), '9')}[0-9]*" for i, d in enumerate(fraction) if d != "9"]
    tail.append(rf"{fraction}[0-9]*[1-9][0-9]*" if is_open else f"{fraction}[0-9]*" if fraction else "[0-9]+")
    dotted = rf"\.(?:{'|'.join(tail)})"
    options.append(f"{whole}{dotted}" if fraction or is_open else f"{whole}(?:{dotted})?")
    return "|".join(options)


def _at_most(less: str, whole: int, fraction: str, is_open: bool) -> str:
    """Decimals of at most `whole.fraction`; `less` are the smaller integer parts."""
    options = [rf"(?:{less})(?:\.[0-9]+)?"] if less else []
    if not fraction:
        if not is_open:
            options.append(rf"{whole}(?:\.0+)?")
        return "|".join(options) if options else r"[^\x00-\u{10FFFF}]"
    tail = [rf"{fraction[:i]}{_digit('0', str(int(d) - 1))}[0-9]*" for i, d in enumerate(fraction) if d != "0"]
    tail += [fraction[:i] for i in range(1, len(fraction))]
    if not is_open:
        tail.append(f"{fraction}0*")
    options.append(rf"{whole}(?:\.(?:{'|'.join(tail)}))?")
    return "|".join(options)


def _multiple(step: Fraction, integer: bool | None) -> str:
    whole = _multiple_of_integer(step.numerator)
    if integer:
        return whole
    if step.denominator == 1:
        return rf"({whole}) /(?:\.0+)?/"
    scale = len(str(step.denominator)) - 1
    if step.numerator == 1 and step.denominator == 10**scale:
        return rf"/-?{_INT}(?:\.[0-9]{{1,{scale}}}0*)?/"
    raise Inexpressible(f"multipleOf {step}")


def _non_multiple(step: Fraction) -> str:
    """Numbers that are no multiple: integers that are none, and fractions if the step is an integer."""
    if step.denominator != 1:
        raise Inexpressible(f"no multiple of {step}")
    if step.numerator == 1:
        return _FRACTIONAL
    return rf"(/-?{_INT}/ & ~({_multiple_of_integer(step.numerator)})) | {_FRACTIONAL}"


@functools.cache
def _multiple_of_integer(step: int) -> str:
    """Integers divisible by `step`, with sign."""
    if step > 1 and str(step).strip("0") == "1":
        return rf"/-?(?:0|[1-9][0-9]*{'0' * (len(str(step)) - 1)})/"
    power, rest = 1, step
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    while power % (step // rest):
        power *= 10
    parts = []
    if power > 1:
        width = len(str(power)) - 1
        if width > 3:
            raise Inexpressible(f"multipleOf {step}")
        ends = "|".join(f"{n:0{width}d}" for n in range(0, power, step // rest))
        short = "|".join(str(n) for n in range(0, power // 10, step // rest))
        parts.append(rf"/-?(?:[0-9]*(?:{ends})|{short})/" if short else rf"/-?[0-9]*(?:{ends})/")
    if rest > 1:
        if rest > _MAX_MODULUS:
            raise Inexpressible(f"multipleOf {step}")
        parts.append(f'"-"? ({_divisible(rest)})')
    return " & ".join(parts) if parts else rf"/-?{_INT}/"


@functools.cache
def _divisible(modulus: int) -> str:
    """Digit strings divisible by a small modulus: its automaton with the states eliminated one by one."""
    edges: dict[tuple[int, int], str] = {}
    for state in range(modulus):
        for digit in range(10):
            key = (state, (state * 10 + digit) % modulus)
            edges[key] = edges.get(key, "") + str(digit)
    labels = {key: digits if len(digits) == 1 else f"[{digits}]" for key, digits in edges.items()}
    for gone in range(modulus - 1, 0, -1):
        loop = labels.pop((gone, gone), "")
        into = [(i, label) for (i, j), label in labels.items() if j == gone]
        out = [(j, label) for (i, j), label in labels.items() if i == gone]
        labels = {(i, j): label for (i, j), label in labels.items() if gone not in (i, j)}
        star = f"(?:{loop})*" if loop else ""
        for i, a in into:
            for j, b in out:
                path = f"(?:{a}){star}(?:{b})"
                labels[i, j] = f"{labels[i, j]}|{path}" if (i, j) in labels else path
        if sum(map(len, labels.values())) > 200_000:
            raise Inexpressible(f"multipleOf {modulus}")
    return f"/(?:{labels[0, 0]})+/"
