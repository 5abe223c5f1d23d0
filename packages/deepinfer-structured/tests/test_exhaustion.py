"""Where values, keys or room run out: what cannot be completed is neither compiled nor begun."""

from __future__ import annotations

from fractions import Fraction

import pytest
from deepinfer_structured import Options, Spec, UnsatisfiableSchema, compile_spec
from deepinfer_structured.guard_values import completions, scalar
from hypothesis import given, settings
from hypothesis import strategies as st

FEW = [
    ({"type": "array", "maxItems": 0}, 1),
    ({"type": "integer", "minimum": 1, "maximum": 3}, 3),
    ({"type": "string", "pattern": "^[ab]?$"}, 3),
    ({"type": "array", "items": {"type": "boolean"}, "maxItems": 1}, 3),
    ({"type": "array", "items": False}, 1),
    ({"type": "object", "required": ["a"], "maxProperties": 1, "properties": {"a": {"type": "boolean"}}}, 2),
]


@pytest.mark.parametrize(("items", "count"), FEW)
def test_no_more_distinct_items_than_there_are(accepts, byte_vocabulary, items, count):
    schema = {"type": "array", "items": items, "uniqueItems": True, "minItems": count}
    compile_spec(Spec.json_schema(schema), byte_vocabulary)
    with pytest.raises(UnsatisfiableSchema):
        compile_spec(Spec.json_schema({**schema, "minItems": count + 1}), byte_vocabulary)


def test_after_the_last_distinct_item_no_comma_is_offered(byte_vocabulary):
    schema = {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 3}, "uniqueItems": True}
    matcher = compile_spec(Spec.json_schema(schema), byte_vocabulary).matcher()
    assert matcher.accept(list(b"[3,1,2,")) == 6


@pytest.mark.parametrize(("pattern", "count"), [("^[0-9]{2}$", 100), ("^[a-z]$", 26)])
def test_no_more_keys_than_there_are(byte_vocabulary, pattern, count):
    schema = {"type": "object", "propertyNames": {"pattern": pattern}, "minProperties": count}
    compile_spec(Spec.json_schema(schema), byte_vocabulary)
    with pytest.raises(UnsatisfiableSchema):
        compile_spec(Spec.json_schema({**schema, "minProperties": count + 1}), byte_vocabulary)


@pytest.mark.parametrize("text", ['{"b":1,"x"', '{"x":1,"b"', '{"x":1,"y"'])
def test_in_any_order_room_is_kept_for_what_is_required(byte_vocabulary, text):
    schema = {"type": "object", "required": ["c"], "maxProperties": 2, "properties": {"b": {}}}
    matcher = compile_spec(Spec.json_schema(schema), byte_vocabulary, Options(property_order="any")).matcher()
    assert matcher.accept(list(text.encode())) < len(text)
    for whole in ('{"b":1,"c":2}', '{"c":1,"x":2}', '{"c":1}'):
        matcher.rollback(len(matcher))
        assert matcher.accept(list(whole.encode())) == len(whole)
        assert matcher.is_accepting


def test_bounded_numbers_are_no_smaller_than_a_float(accepts):
    schema = {"type": "number", "exclusiveMinimum": 0}
    assert accepts(schema, "1e-300")
    assert not accepts(schema, "1e-400")  # a 64-bit float takes it for 0
    assert not accepts({"type": "number", "exclusiveMaximum": 0}, "-7e-1366")


digits = st.from_regex(r"[0-9]{1,3}", fullmatch=True)
number = st.from_regex(r"-?(0|[1-9][0-9]{0,2})(\.[0-9]{1,3})?([eE][+-]?0?[0-9])?", fullmatch=True)


@settings(max_examples=300, deadline=None)
@given(number, digits, number)
def test_completions_are_the_digits_that_make_a_number_equal(whole, more, other):
    """Judged by exact fractions; a zero with an exponent is never begun where it counts."""
    for begun in (whole[:end] for end in range(len(whole))):
        if "e" in begun.lower() and not begun.lower().partition("e")[0].strip("-0."):
            continue
        for value in {scalar(whole.encode()), scalar(other.encode())}:
            assert value is not None
            found = completions(begun.encode(), value, 3)
            assert all(1 <= len(text) <= 3 and scalar(begun.encode() + text) == value for text in found)
            if scalar((begun + more).encode()) is not None:
                equal = Fraction(begun + more) == Fraction(value.decode())
                assert (more.encode() in found) == equal, (begun, more, value)


def test_notes_name_what_is_no_keyword_once(byte_vocabulary):
    schema = {
        "$schema": "https://example.com/mine",
        "properties": {"a": {"minLenght": 2}, "b": {"minLenght": 3, "x-own": 1}},
        "title": "free",
    }
    notes = compile_spec(Spec.json_schema(schema), byte_vocabulary).notes
    assert len(notes) == 2
    assert "example.com/mine" in notes[0]
    assert "'minLenght' at /properties/a (did you mean 'minLength'?)" in notes[1]
    either = [{"type": "array", "uniqueItems": True}, {"type": "array", "maxItems": 3}]
    twice = {"properties": {name: {"oneOf": either} for name in "abc"}}
    notes = compile_spec(Spec.json_schema(twice), byte_vocabulary).notes
    assert len(notes) == len(set(notes)) == 1


@pytest.mark.parametrize(
    "tag",
    [
        {"structures": [{"begin": "<t>", "schema": {}, "end": "</t>"}], "triggers": [5]},
        {"structures": [{"begin": "<t>", "schema": {}, "end": 5}], "triggers": ["<"]},
        {"structures": [5], "triggers": ["<"]},
    ],
)
def test_tags_of_other_types_are_told(byte_vocabulary, tag):
    with pytest.raises(Exception, match="got 5"):
        compile_spec(Spec.structural_tag(tag), byte_vocabulary)
