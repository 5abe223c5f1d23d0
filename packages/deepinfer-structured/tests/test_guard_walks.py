"""Walks along the guard's masks: never a dead end, and a mask offers just what `accept` takes."""

from __future__ import annotations

import json

import jsonschema
import pytest
from deepinfer_structured import Options, Spec, StructuredError, Vocabulary, allocate_mask, allowed_tokens, compile_spec
from hypothesis import given, settings
from hypothesis import strategies as st

_PIECES = [
    b'","',
    b'["',
    b" -",
    b", ",
    b',"',
    b" 0",
    b"00",
    b"10",
    b"-0",
    b' "a',
    b'"}',
    b'":',
    b'{"',
    b"},{",
    b", {",
    b"ab",
    b"\\\\",
    b"a\\",
]
_PIECES += [
    b'{"a":',
    b"true",
    b" true",
    b",-",
    b"],[",
    b" []",
    b'":true',
    b'"a"',
    b"1,",
    b"re",
    "ä".encode(),
    b'"\\',
    b'\\"',
    b"1 ",
    b"1]",
]
VOCABULARY = Vocabulary([bytes([i]) for i in range(256)] + [b"<eos>", *_PIECES], eos_ids=[256])
LIKELY = frozenset(b'[]{}",:0123456789-.eEtrufalsndgabAB\\ ')
PATTERNS = ["^[AB]{2}$", "^(red|green)$", "^[abä]+$", "^a*$", "^(a|ab|b.)$", "^[^a]$", '^(\\\\|\\n|")+$', "^$|^a[ab]?$"]

pattern = st.sampled_from(PATTERNS).map(lambda p: {"type": "string", "pattern": p})
number = st.sampled_from([{"type": "integer"}, {"type": "number"}, {"type": "number", "multipleOf": 0.5}]).flatmap(
    lambda s: st.sampled_from([{}, {"minimum": 0}, {"minimum": 0, "maximum": 11}, {"minimum": -2, "maximum": 110}]).map(
        lambda bounds: s | bounds
    )
)
leaf = (
    pattern
    | number
    | st.sampled_from([{"type": "string"}, {"type": "string", "maxLength": 1}, {"type": ["boolean", "null"]}])
)


def _array(items, least):
    return {"type": "array", "items": items, "uniqueItems": True, "minItems": least}


def _object(member, closed):
    schema = {"type": "object", "properties": {"a": member}, "required": ["a"]}
    return schema | ({"additionalProperties": False} if closed else {"minProperties": 2})


def _named(names, member):
    return {"type": "object", "propertyNames": names, "additionalProperties": member, "minProperties": 2}


inner = leaf | st.builds(_object, leaf | st.just({"type": "boolean"}), st.booleans())
inner |= st.builds(
    lambda v: {"type": "array", "items": v, "minItems": 1, "maxItems": 2}, leaf | st.just({"type": "boolean"})
)
arrays = st.builds(_array, inner | st.builds(_array, leaf, st.just(0)), st.integers(0, 2))
objects = st.builds(_named, pattern, leaf) | st.builds(_object, arrays, st.just(False))


def _takes(matcher, token):
    return matcher.is_accepting if token == 256 else matcher.allows([token]) == 1


def _walk(schema, numbers, taken_too):
    try:
        matcher = compile_spec(Spec.json_schema(schema), VOCABULARY, Options(max_whitespace=1)).matcher()
    except StructuredError:
        return
    text = bytearray()
    for number in numbers:
        offered = allowed_tokens(matcher.mask(), VOCABULARY.size).tolist()
        if taken_too:
            row = allocate_mask(1, VOCABULARY.size)[0]
            matcher.native.fill(row)  # of forced text it offers one division into tokens only
            taken = [t for t in allowed_tokens(row, VOCABULARY.size).tolist() if _takes(matcher, t)]
            assert offered == taken, bytes(text)
        likely = [t for t in offered if t > 256 or t in LIKELY] or offered
        token = 256 if 256 in offered and number % 3 == 0 else likely[number // 3 % len(likely)]
        assert matcher.accept([token]) == 1
        if token == 256:
            assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)), bytes(text)
            return
        text += VOCABULARY.tokens[token]


@settings(max_examples=40, deadline=None)
@given(arrays | objects, st.lists(st.integers(0, 1 << 30), min_size=15, max_size=15))
def test_a_mask_offers_what_accept_takes(schema, numbers):
    _walk(schema, numbers, True)


@settings(max_examples=80, deadline=None)
@given(arrays | objects, st.lists(st.integers(0, 1 << 30), min_size=40, max_size=40))
def test_walks_have_no_dead_end(schema, numbers):
    """`mask` raises at one."""
    _walk(schema, numbers, False)


_A_NUMBER = {"type": "object", "properties": {"a": {"type": "number", "minimum": 0}}, "required": ["a"]}
_DEAD = [
    ({"type": "integer"}, "[0,0"),
    ({"type": "integer"}, "[0, -0"),
    ({"type": "integer", "minimum": 0, "maximum": 100}, "[100,100"),
    ({"type": "string", "pattern": "^[A-Z]{2}$"}, '["DE","DE'),
    ({"type": "string", "pattern": "^(red|green)$"}, '["red","r'),
    ({"type": "string", "pattern": "^(red|green)$"}, '["red","green",'),
    ({"type": "string", "pattern": "^[a-zäöüß]+$"}, '["a","\\'),
    (_A_NUMBER | {"additionalProperties": False}, '[{"a":0},{"a":-'),
    ({"type": "number"}, "[0,0e"),
    ({"type": "number", "minimum": 5, "maximum": 5}, "[5,"),
]


@pytest.mark.parametrize(("items", "text"), _DEAD)
def test_what_leads_to_a_repetition_alone_is_neither_offered_nor_accepted(byte_vocabulary, items, text):
    matcher, data = compile_spec(Spec.json_schema(_array(items, 0)), byte_vocabulary).matcher(), text.encode()
    assert matcher.accept(list(data[:-1])) == len(data) - 1
    assert matcher.allows([data[-1]]) == 0
    assert data[-1] not in allowed_tokens(matcher.mask(), byte_vocabulary.size).tolist()
