"""Patterns against Python's `re` (an independent engine), in Python and through the grammar library."""

from __future__ import annotations

import json
import re

import pytest
from deepinfer_structured import InvalidSpec, Spec, compile_spec
from deepinfer_structured.regex import complement, language, matches
from deepinfer_structured.regex.parse import UnsupportedPattern
from hypothesis import assume, given, settings
from hypothesis import strategies as st

PATTERNS = [
    r"a+b",
    r"^a+b$",
    r"^(?!foo)[a-z]+$",
    r"^(?=.*\d)(?=.*[a-z]).{3,8}$",
    r"\bfoo\b",
    r"\Bo",
    r"^((?!ab).)*$",
    r"^((?!a)(?!b).)*$",
    r"(^a|b$)",
    r'^[^"\\/]*$',
    r"a{2,3}c?",
    r"\n|\t",
    r"^\w+@\w+\.\w+$",
    r"(?<=a)b",
    r"(?<!a)b",
    r"^$",
    r"",
    r"é|中",
    r"[^a]",
    r"^.$",
    r"(?i)abc",
    r"x(?=y)",
    r"x(?!y)",
    r"^\S+$",
    r"^(a|b)*?(?:c)$",
    r"[a-f\d]{2}-",
    r"a|^b|c$",
    r"\u0041|\x62",
]
TEXTS = st.one_of(
    st.text(alphabet='ab1 fo"\\/\nxyéABC中😀.@-c', max_size=8),
    st.sampled_from(["foo", "a foo b", "ab", "aab", "a1b", "xy", "é", "a@b.f", "foob", "abc", "bca"]),
)


def _python(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern.replace("$", r"\Z"), re.ASCII)  # a word's characters are ASCII in ECMAScript


@settings(max_examples=600, deadline=None)
@given(st.sampled_from(PATTERNS), TEXTS)
def test_language_and_complement_agree_with_python(pattern, text):
    found = language(pattern)
    expected = _python(pattern).search(text) is not None
    assert matches(found, text) == expected
    assert matches(complement(found), text) != expected


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(PATTERNS), TEXTS, st.booleans(), st.booleans())
def test_grammar_agrees_with_python(accepts, pattern, text, negated, ascii_only):
    assume(pattern or not negated)  # nothing lacks the empty pattern: refused as unsatisfiable
    schema = {"type": "string", "not": {"pattern": pattern}} if negated else {"type": "string", "pattern": pattern}
    expected = (_python(pattern).search(text) is not None) != negated
    assert accepts(schema, json.dumps(text, ensure_ascii=ascii_only)) == expected


@pytest.mark.parametrize("pattern", ["(", "a{3,2}", "[z-a]", "*a", "(?<n", r"\u{110000}", "a)"])
def test_malformed_patterns_are_named(pattern):
    with pytest.raises(InvalidSpec, match="regular expression"):
        language(pattern)


@pytest.mark.parametrize("pattern", [r"(a)\1", r"(?:(?=a)b|c){1,9}", "a++", r"\p{Script=Greek}"])
def test_what_is_not_regular_is_refused(pattern):
    with pytest.raises(UnsupportedPattern, match="not supported"):
        language(pattern)


def test_regex_spec_matches_the_whole_text(accepts):
    assert accepts(Spec.regex(r"\d{3}-(?!000)\d{3}"), "123-456")
    assert not accepts(Spec.regex(r"\d{3}-(?!000)\d{3}"), "123-000")
    assert not accepts(Spec.regex("b"), "abc")


def test_a_regex_that_nothing_matches_is_refused(byte_vocabulary):
    with pytest.raises(InvalidSpec, match="no text matches"):
        compile_spec(Spec.regex("a^b"), byte_vocabulary)


def test_character_properties_follow_unicode(accepts):
    schema = {"type": "string", "pattern": r"^[\p{L}]+$"}
    assert accepts(schema, '"é中"')
    assert not accepts(schema, '"p{L}"')
    assert not accepts(schema, '"1"')
