"""Random schemas against `jsonschema`: nothing invalid is accepted, and (in any property order) nothing valid is lost."""

from __future__ import annotations

import json
import warnings

import jsonschema
import pytest
from deepinfer_structured import (
    LimitExceeded,
    Limits,
    Options,
    Spec,
    UnsatisfiableSchema,
    UnsupportedSchema,
    compile_spec,
)
from deepinfer_structured.bitmask import allowed_tokens
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

NAMES = st.sampled_from(["a", "b", "ab"])
SCALARS = st.sampled_from([None, True, False, 0, 1, 2, 5, -3, 1.5, "", "a", "b", "ab", "aab"])
VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(NAMES, v, max_size=3), max_leaves=6)
PATTERNS = st.sampled_from(["^a", "b$", "^a*$", "a|b", "^(?!ab)", "^.{1,2}$"])
LEAVES = st.one_of(
    st.booleans(),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])}
    ),
    st.fixed_dictionaries({"enum": st.lists(VALUES, min_size=1, max_size=3)}),
    st.fixed_dictionaries({"const": VALUES}),
    st.fixed_dictionaries(
        {"minimum": st.sampled_from([0, 1, 1.5, -2]), "exclusiveMaximum": st.sampled_from([2, 5, 1.5])}
    ),
    st.fixed_dictionaries({"multipleOf": st.sampled_from([1, 2, 3, 0.5])}),
    st.fixed_dictionaries({"pattern": PATTERNS}),
    st.fixed_dictionaries({"minLength": st.integers(0, 2)}, optional={"maxLength": st.integers(0, 3)}),
    st.fixed_dictionaries({"required": st.lists(NAMES, max_size=2, unique=True)}),
    st.fixed_dictionaries({"minProperties": st.integers(0, 2)}, optional={"maxProperties": st.integers(0, 3)}),
    st.fixed_dictionaries({"minItems": st.integers(0, 2)}, optional={"maxItems": st.integers(0, 3)}),
    st.just({"uniqueItems": True}),
    st.fixed_dictionaries(
        {"dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, max_size=2, unique=True), max_size=2)}
    ),
)


def _branches(inner):
    some = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        st.fixed_dictionaries(
            {"properties": st.dictionaries(NAMES, inner, max_size=3)}, optional={"additionalProperties": inner}
        ),
        st.fixed_dictionaries(
            {"patternProperties": st.dictionaries(PATTERNS, inner, max_size=2), "additionalProperties": inner}
        ),
        st.fixed_dictionaries({"propertyNames": inner}),
        st.fixed_dictionaries({"items": inner}, optional={"prefixItems": some}),
        st.fixed_dictionaries(
            {"contains": inner}, optional={"minContains": st.integers(0, 2), "maxContains": st.integers(0, 2)}
        ),
        st.fixed_dictionaries({"allOf": some}),
        st.fixed_dictionaries({"anyOf": some}),
        st.fixed_dictionaries({"oneOf": some}),
        st.fixed_dictionaries({"not": inner}),
        st.fixed_dictionaries({"if": inner, "then": inner}, optional={"else": inner}),
        st.fixed_dictionaries({"dependentSchemas": st.dictionaries(NAMES, inner, max_size=2)}),
        st.fixed_dictionaries(
            {"properties": st.dictionaries(NAMES, inner, max_size=2), "unevaluatedProperties": inner}
        ),
        st.fixed_dictionaries({"anyOf": some, "unevaluatedItems": inner}),
        st.tuples(inner, inner).map(lambda pair: _merge(*pair)),
    )


def _merge(left, right):
    return left if not isinstance(left, dict) or not isinstance(right, dict) else {**right, **left}


SCHEMAS = st.recursive(LEAVES, _branches, max_leaves=6)


def _valid(schema, value) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return jsonschema.Draft202012Validator(schema).is_valid(value)


def _compile(schema, vocabulary, **options):
    try:
        return compile_spec(Spec.json_schema(schema), vocabulary, Options(**options))
    except (UnsupportedSchema, UnsatisfiableSchema, LimitExceeded):
        return None


SETTINGS = settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))


@SETTINGS
@given(SCHEMAS, st.lists(VALUES, min_size=1, max_size=8))
def test_nothing_invalid_is_accepted(byte_vocabulary, schema, values):
    grammar = _compile(schema, byte_vocabulary, property_order="any")
    assume(grammar is not None)
    for value in values:
        data = list(json.dumps(value).encode())
        matcher = grammar.matcher()
        if matcher.accept(data) == len(data) and matcher.is_accepting:
            assert _valid(schema, value), f"accepted {value!r}"
        elif not grammar.notes and not grammar.unique:  # notes and guards stand for known narrowings
            assert not _valid(schema, value), f"refused {value!r}"


@SETTINGS
@given(SCHEMAS, st.lists(st.integers(0, 1 << 30), min_size=60, max_size=60))
def test_whatever_the_masks_allow_is_valid(byte_vocabulary, schema, numbers):
    grammar = _compile(schema, byte_vocabulary, max_whitespace=1)
    assume(grammar is not None)
    matcher, text = grammar.matcher(), bytearray()
    for number in numbers:
        allowed = [t for t in allowed_tokens(matcher.mask(), 257).tolist() if t < 128 or t == 256]
        assert allowed, f"dead end after {bytes(text)!r}"
        token = 256 if 256 in allowed and number % 3 else allowed[number % len(allowed)]
        assert matcher.accept([token]) == 1
        if token == 256:
            value = json.loads(text)
            assert _valid(schema, value), f"generated {bytes(text)!r}"
            return
        text.append(token)


@pytest.mark.parametrize("max_cases", [1, 2, 256])
def test_branches_of_one_of_stay_exclusive_where_alternatives_are_cut(byte_vocabulary, max_cases):
    """Which alternatives a limit cuts says nothing about whether two branches share a value."""
    either = {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
    wide = {"type": "object", "allOf": [either, {"anyOf": [{"maxProperties": 9}, {"maxProperties": 8}]}]}
    schema = {"oneOf": [{"type": "object", "required": ["b"], "properties": {"a": False}}, wide]}
    grammar = compile_spec(Spec.json_schema(schema), byte_vocabulary, Options(limits=Limits(max_cases=max_cases)))
    for text, valid in ((b'{"b":1}', False), (b'{"a":1}', True)):
        matcher = grammar.matcher()
        accepted = matcher.accept_text(text) and matcher.is_accepting
        assert valid or not accepted
        if max_cases == 256:
            assert accepted == valid


def test_a_wide_object_takes_no_other_spelling_of_its_keys(byte_vocabulary):
    properties = {f"p{i}": {"type": "integer"} for i in range(2000)}
    schema = {"type": "object", "properties": properties, "additionalProperties": {"type": "string"}}
    grammar = compile_spec(Spec.json_schema(schema), byte_vocabulary)
    assert grammar.matcher().accept(list(rb'{"p1": 1, "q": "x"}')) == 19
    for text in (rb'{"\u0070\u0031": "x"}', rb'{"p1": 1, "\u0070\u0031": "x"}', rb'{"p1": "x"}'):
        assert grammar.matcher().accept(list(text)) < len(text)


def test_what_is_too_much_is_refused_and_given_to_no_other_compiler(byte_vocabulary):
    """llguidance's own schema compiler takes other spellings of named keys where keys are open."""
    schema = {"type": "object", "properties": {f"p{i}": {"minimum": i} for i in range(9)}}
    with pytest.raises(LimitExceeded) as caught:  # no analysis is as quick as that
        compile_spec(Spec.json_schema(schema), byte_vocabulary, Options(limits=Limits(seconds=1e-9)))
    assert caught.value.keyword == "properties"
