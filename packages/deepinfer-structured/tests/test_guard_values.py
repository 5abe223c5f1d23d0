"""Normal forms of generated JSON: exact at any size, and a matcher that no text makes raise."""

from __future__ import annotations

import json
from fractions import Fraction

import numpy as np
import pytest
from deepinfer_structured import Spec, Vocabulary, allocate_mask, allowed_tokens, compile_spec
from deepinfer_structured.guard_values import compact, normal, scalar
from hypothesis import given, settings
from hypothesis import strategies as st

NUMBERS = {"type": "array", "items": {"type": "number"}, "uniqueItems": True}
ANYTHING = {"type": "array", "uniqueItems": True}
number = st.from_regex(r"-?(0|[1-9][0-9]{0,3})(\.[0-9]{1,4})?([eE][+-]?[0-9]{1,2})?", fullmatch=True)
value = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=2), v, max_size=3),
    max_leaves=8,
)


@settings(max_examples=400, deadline=None)
@given(number, number)
def test_numbers_are_equal_as_fractions_are(a, b):
    for x, y in ((a, b), (a, str(int(Fraction(a))) if Fraction(a).denominator == 1 else a), (a, a + "e-3")):
        if y.count("e") + y.count("E") < 2:
            assert (scalar(x.encode()) == scalar(y.encode())) == (Fraction(x) == Fraction(y)), (x, y)


@settings(max_examples=200, deadline=None)
@given(value)
def test_spellings_of_one_value_are_one(found):
    pretty = json.dumps(found, indent=1).encode()
    assert normal(pretty) == normal(json.dumps(found, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    assert compact(pretty) == json.dumps(found, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("text", "same"), [("1e999", "10e998"), ("1e-999", "0.1e-998"), ("7" * 5000, "7" * 5000 + ".0")]
)
def test_numbers_beyond_a_loader(byte_vocabulary, text, same):
    matcher = compile_spec(Spec.json_schema(NUMBERS), byte_vocabulary).matcher()
    assert matcher.accept(list(f"[{text},".encode())) == len(text) + 2
    assert matcher.accept(list(f"{same}".encode())) == len(same)
    before = matcher.mask()
    assert ord(",") not in allowed_tokens(before, 257).tolist()
    assert matcher.allows([ord(",")]) == matcher.accept([ord(",")]) == 0
    assert np.array_equal(matcher.mask(), before)
    assert matcher.fill_draft_masks(list(b"1,2"), allocate_mask(4, 257)) == 3
    matcher.rollback(len(matcher))
    assert matcher.accept(list(b"[1e" + b"9" * 5000 + b",2]")) == 5006


def test_nesting_beyond_a_loader(byte_vocabulary):
    matcher, deep = compile_spec(Spec.json_schema(ANYTHING), byte_vocabulary).matcher(), 1000
    text = b"[" * deep + b"]" * deep
    assert matcher.accept(list(b"[" + text + b",")) == 2 * deep + 2
    assert matcher.accept(list(text)) == 2 * deep - 1  # the last bracket would repeat the item
    assert ord("]") not in allowed_tokens(matcher.mask(), 257).tolist()


def test_tokens_with_blanks_before_an_item():
    pieces = [
        b" {}",
        b" {},",
        b" []",
        b"\n[],",
        b" { }",
        b" true,",
        b" 1,",
        b",true",
        b", null",
        b'",true',
        b",1 ",
        b" 1 ",
    ]
    vocabulary = Vocabulary([bytes([i]) for i in range(256)] + [b"<eos>", *pieces], eos_ids=[256])
    matcher = compile_spec(Spec.json_schema(ANYTHING), vocabulary).matcher()
    for start in (b"[{},", b"[[],", b"[true,", b"[true,1", b'[true,null,"', b"[1,", b"[1,2", b"[1,[true", b"[true,[1]"):
        matcher.rollback(len(matcher))
        assert matcher.accept(list(start)) == len(start)
        offered = set(allowed_tokens(matcher.mask(), vocabulary.size).tolist())
        assert offered == {t for t in range(len(vocabulary.tokens)) if matcher.allows([t])}, start
