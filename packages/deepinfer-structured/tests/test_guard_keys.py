"""Distinct keys where a repetition would count, or overwrite what must be there: masks, verdicts, no dead ends."""

from __future__ import annotations

import json

import jsonschema
import pytest
from deepinfer_structured import Options, Spec, UnsupportedSchema, allowed_tokens, compile_spec
from deepinfer_structured.regex import language
from deepinfer_structured.regex.finite import texts
from hypothesis import given, settings
from hypothesis import strategies as st

FREE = {"type": "object", "minProperties": 3, "additionalProperties": {"enum": [1]}}
SHORT = {**FREE, "propertyNames": {"pattern": "^(a|ab|b.*)$"}}
LIMITED = {**FREE, "propertyNames": {"maxLength": 1}}
FEW = {**FREE, "propertyNames": {"enum": ["a", "b", "ab"]}}
NAMED = {**FREE, "properties": {"a": {"enum": [1, 2]}}, "patternProperties": {"^b": {"enum": [2]}}}
WITNESS = {"type": "object", "not": {"additionalProperties": {"enum": [1]}}, "additionalProperties": {"enum": [1, 2]}}
PATTERN = {
    "type": "object",
    "additionalProperties": {"enum": [1, 2]},
    "allOf": [{"not": {"patternProperties": {"^a": {"enum": [1]}}}}, {"propertyNames": {"maxLength": 2}}],
}
NESTED = {"type": "object", "minProperties": 2, "additionalProperties": {"anyOf": [{"enum": [1]}, FREE]}}
ALL = [FREE, SHORT, LIMITED, FEW, NAMED, WITNESS, PATTERN, NESTED]
TEXTS = [
    (FREE, '{"a":1,"b":1,"c":1}', True),
    (FREE, '{"a":1,"a":1,"b":1}', False),
    (FREE, '{"ab":1,"a":1,"abc":1}', True),
    (FREE, '{"\\n":1,"\\n":1}', False),
    (FREE, '{"":1, "a":1, "":1}', False),
    (SHORT, '{"a":1,"ab":1,"b":1}', True),
    (WITNESS, '{"x":2,"x":1}', False),
    (WITNESS, '{"x":2,"y":1}', True),
    (NESTED, '{"a":{"a":1,"b":1,"c":1},"b":1}', True),
    (NESTED, '{"a":{"a":1,"b":1,"a":1},"b":1}', False),
]


@pytest.mark.parametrize(("schema", "text", "good"), TEXTS)
def test_verdict_and_masks_along_the_text(vocabulary, schema, text, good):
    matcher, size = compile_spec(Spec.json_schema(schema), vocabulary).matcher(), vocabulary.size
    accepted = True
    for byte in text.encode():
        offered = set(allowed_tokens(matcher.mask(), size).tolist())
        assert all(t == 256 or matcher.allows([t]) == 1 for t in offered)
        if matcher.accept([byte]) != 1:
            accepted = False
            assert byte not in offered
            break
        assert byte in offered
    assert (accepted and matcher.is_accepting) == good


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(ALL), st.booleans(), st.lists(st.integers(0, 1 << 30), min_size=60, max_size=60))
def test_whatever_the_masks_allow_is_valid(vocabulary, schema, any_order, numbers):
    """Few characters, so that keys repeat often. `mask` raises at a dead end."""
    options = Options(max_whitespace=1, property_order="any" if any_order else "schema")
    matcher, text = compile_spec(Spec.json_schema(schema), vocabulary, options).matcher(), bytearray()
    for number in numbers:
        allowed = allowed_tokens(matcher.mask(), vocabulary.size).tolist()
        assert all(matcher.allows([t]) == 1 for t in allowed)
        likely = [t for t in allowed if t >= 256 or t in b'{}",:12ab'] or allowed
        token = 256 if 256 in likely and number % 3 else likely[number % len(likely)]
        assert matcher.accept([token]) == 1
        if token == 256:
            value = json.loads(text)
            assert jsonschema.Draft202012Validator(schema).is_valid(value), bytes(text)
            return
        text += vocabulary.tokens[token]


def test_a_key_that_can_only_repeat_is_not_begun(byte_vocabulary):
    matcher = compile_spec(Spec.json_schema(SHORT), byte_vocabulary).matcher()
    assert matcher.accept(list(b'{"a":1,"ab":1,"')) == 15
    offered = allowed_tokens(matcher.mask(), 257).tolist()
    assert ord("a") not in offered
    assert ord("b") in offered
    assert len(matcher) == 15


def test_the_guard_is_there_only_where_a_repetition_counts(byte_vocabulary):
    harmless = [
        {"type": "object"},
        {"type": "object", "minProperties": 1},
        {"type": "object", "maxProperties": 3},
        {"type": "object", "required": ["a"], "minProperties": 2},
        {"type": "object", "minProperties": 2, "properties": {"a": {}, "b": {}}, "additionalProperties": False},
        FEW,
        {"type": "object", "not": {"propertyNames": {"maxLength": 2}}},
    ]
    for schema in harmless:
        assert compile_spec(Spec.json_schema(schema), byte_vocabulary).matcher().guard is None, schema
    for schema in (FREE, SHORT, LIMITED, NAMED, WITNESS, PATTERN, NESTED):
        assert compile_spec(Spec.json_schema(schema), byte_vocabulary).matcher().guard is not None, schema


def test_more_keys_than_there_are_is_refused(accepts, byte_vocabulary):
    assert accepts(FEW, '{"a":1,"b":1,"ab":1}', property_order="any")
    assert not accepts(FEW, '{"a":1,"b":1,"b":1}')
    with pytest.raises(Exception, match="fits"):
        compile_spec(Spec.json_schema({**FEW, "minProperties": 4}), byte_vocabulary)


def test_inside_a_tag_it_is_refused(byte_vocabulary):
    tag = {"structures": [{"begin": "<t>", "schema": FREE, "end": "</t>"}], "triggers": ["<t>"]}
    with pytest.raises(UnsupportedSchema, match="minProperties"):
        compile_spec(Spec.structural_tag(tag), byte_vocabulary)


@pytest.mark.parametrize(
    ("pattern", "found"),
    [("^[ab]$", ["a", "b"]), ("^(x|xy?)$", ["x", "xy"]), ("^a{0,2}$", ["", "a", "aa"]), ("^a", None), ("^a*$", None)],
)
def test_texts_of_small_languages(pattern, found):
    listed = texts(language(pattern), 8)
    assert (listed and sorted(listed)) == found
    assert texts(language("^[a-z]$"), 8) is None
