"""`uniqueItems` out of unbounded sets: what the guard's masks offer is accepted, and repetitions are not."""

from __future__ import annotations

import json

import jsonschema
import pytest
from deepinfer_structured import MatcherError, Spec, allowed_tokens, compile_spec
from hypothesis import given, settings
from hypothesis import strategies as st

STRINGS = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
NUMBERS = {"type": "array", "items": {"type": "number"}, "uniqueItems": True}
ANYTHING = {"type": "array", "uniqueItems": True}
TEXTS = [
    (STRINGS, '["a","b"]'),
    (STRINGS, '["a","a"]'),
    (STRINGS, '["ab", "a", "abc"]'),
    (STRINGS, '["\\n","\\n"]'),
    (NUMBERS, "[12,1,123]"),
    (NUMBERS, "[1, 1.0]"),
    (NUMBERS, "[1, 10, 1]"),
    (ANYTHING, '[1,true,"x",{"a":1},{"a":2}]'),
    (ANYTHING, '[{"a":1,"b":2},{"b":2,"a":1}]'),
    (ANYTHING, "[[],[]]"),
    (ANYTHING, "[true,true]"),
    (ANYTHING, "[[1,2],[1]]"),
    ({"properties": {"x": ANYTHING, "y": {"type": "array"}}}, '{"x":[1,2],"y":[1,1]}'),
    ({"properties": {"": ANYTHING}}, '{"":[1,1]}'),
]


@pytest.mark.parametrize(("schema", "text"), TEXTS)
def test_verdict_and_masks_along_the_text(vocabulary, schema, text):
    matcher, size = compile_spec(Spec.json_schema(schema), vocabulary).matcher(), vocabulary.size
    accepted = True
    for byte in text.encode():
        offered = set(allowed_tokens(matcher.mask(), size).tolist())
        taken = {t for t in offered if t != 256 and matcher.allows([t]) == 1} | (
            {256} if matcher.is_accepting else set()
        )
        assert offered == taken
        if matcher.accept([byte]) != 1:
            accepted = False
            break
    assert (accepted and matcher.is_accepting) == jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
    matcher.rollback(len(matcher))
    assert matcher.accept(list(b"{" if "properties" in schema else b"[")) == 1


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([STRINGS, NUMBERS, ANYTHING]), st.lists(st.integers(0, 1 << 30), min_size=40, max_size=40))
def test_whatever_the_masks_allow_is_distinct(vocabulary, schema, numbers):
    matcher, text = compile_spec(Spec.json_schema(schema), vocabulary).matcher(), bytearray()
    for number in numbers:
        allowed = [t for t in allowed_tokens(matcher.mask(), vocabulary.size).tolist() if t > 256 or t in b'[]{}",:1a']
        if not allowed:
            return
        token = allowed[number % len(allowed)]
        assert matcher.accept([token]) == 1
        text += vocabulary.tokens[token]
        if matcher.is_accepting:
            assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)), bytes(text)
            return


def test_a_dead_end_is_an_error_and_not_a_free_mask(byte_vocabulary):
    item = {"type": "string", "pattern": "^a{0,1}$"}  # two texts, which the guard cannot count
    schema = {"type": "array", "prefixItems": [item] * 3, "uniqueItems": True, "minItems": 3}
    matcher = compile_spec(Spec.json_schema(schema), byte_vocabulary).matcher()
    assert matcher.accept(list(b'["","a","a')) == 7  # a comma cannot be followed, and no bracket may
    with pytest.raises(MatcherError, match="no distinct array item"):
        matcher.mask()
