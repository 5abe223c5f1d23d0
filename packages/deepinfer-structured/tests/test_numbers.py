"""Bounds of numbers against exact comparison of decimals."""

from __future__ import annotations

from decimal import Decimal

import pytest
from deepinfer_structured import LimitExceeded, UnsatisfiableSchema, UnsupportedSchema
from hypothesis import assume, given, settings
from hypothesis import strategies as st

BOUNDS = st.one_of(
    st.integers(-1200, 1200).map(Decimal),
    st.decimals("-30", "30", places=2),
    st.sampled_from([Decimal("0.1"), Decimal("1e-3")]),
)
TEXTS = st.one_of(
    st.integers(-2000, 2000).map(str),
    st.decimals("-40", "40", places=3).map(lambda d: f"{d:f}"),
    st.tuples(st.integers(1, 9), st.integers(0, 99), st.integers(-3, 3)).map(lambda t: f"{t[0]}.{t[1]}e{t[2]}"),
    st.tuples(
        st.sampled_from(["", "-"]), st.integers(1, 9), st.sampled_from(["e", "E+", "E-0"]), st.integers(0, 3)
    ).map(lambda t: "".join(map(str, t))),
)


@settings(max_examples=300, deadline=None)
@given(BOUNDS, BOUNDS, st.booleans(), st.booleans(), TEXTS, st.booleans())
def test_bounds(accepts, low, high, low_open, high_open, text, integer):
    assume(low <= high and not (integer and "e" in text.lower()) and not (integer and "." in text))
    schema = (
        f'{{"type":"{"integer" if integer else "number"}","{"exclusiveM" if low_open else "m"}inimum":{low:f},'
        f'"{"exclusiveM" if high_open else "m"}aximum":{high:f}}}'
    )
    value = Decimal(text)
    expected = (value > low if low_open else value >= low) and (value < high if high_open else value <= high)
    try:
        accepted = accepts(schema, text)
    except UnsatisfiableSchema:
        accepted = False
    if text.startswith("-") and value == 0:
        assert expected or not accepted
    else:
        assert accepted == expected


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["3", "7", "12", "0.01", "0.5", "25", "2.5"]), st.booleans(), TEXTS)
def test_multiples(accepts, step, negated, text):
    assume("e" not in text.lower())
    schema = f'{{"type":"number","multipleOf":{step}}}'
    if negated:
        assume("." not in step)
        schema = f'{{"type":"number","not":{schema}}}'
    expected, accepted = (Decimal(text) % Decimal(step) == 0) != negated, accepts(schema, text)
    assert expected or not accepted
    if not ("." in text and text.endswith("0")):  # 0.50 is a second spelling of 0.5
        assert accepted == expected


NEAR = st.tuples(st.sampled_from([10, 10**9, 10**14, 2**53, 2**63, 10**15, 10**20]), st.integers(-4, 4)).map(sum)


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(["1", "2", "3", "0.5", "0.1"]),
    NEAR,
    st.sampled_from(["", ".5", ".1", ".000001"]),
    NEAR,
    st.booleans(),
)
def test_bounds_beyond_the_exact_floats_are_kept_beside_a_multiple(accepts, step, bound, part, value, upper):
    """Such a bound must not be rounded: 2**53 and 2**53 + 1 are one float."""
    schema = f'{{"type":"number","multipleOf":{step},"{"maximum" if upper else "minimum"}":{bound}{part}}}'
    limit = Decimal(f"{bound}{part}")
    expected = (value <= limit if upper else value >= limit) and Decimal(value) % Decimal(step) == 0
    try:
        accepted = accepts(schema, str(value))
    except UnsupportedSchema:
        return
    assert accepted == expected


def test_a_multiple_of_too_many_digits_is_named(accepts):
    with pytest.raises(LimitExceeded, match="cannot express") as caught:
        accepts({"properties": {"a": {"multipleOf": 1e-12}, "b": {"multipleOf": 1e-12}}}, "{}")
    assert (caught.value.pointer, caught.value.keyword) == ("/properties/a", "multipleOf"), "the first of them"
