"""The bound on whitespace outside strings: tables, masks, rollback, against a grammar that counts and a plain reader."""

from __future__ import annotations

import re

import numpy as np
import pytest
from deepinfer_structured import (
    Matcher,
    MatcherError,
    Options,
    Spec,
    Vocabulary,
    allocate_mask,
    allowed_tokens,
    compile_spec,
    fill_masks,
)
from deepinfer_structured.engines import llguidance
from deepinfer_structured.lowering import lower_spec
from deepinfer_structured.schema.lower import lower
from deepinfer_structured.whitespace import WhitespaceTables
from hypothesis import given, settings
from hypothesis import strategies as st

BOUND = 3
BLANKS = [b"  ", b"\n   ", b" \t\r\n", b'  "', b'" ', b'":  ', b"}\n", b',    "', b'" , "', b"1,    2", b'\n\n"a']
PIECES = [*BLANKS, b'\\"', b'\\" ', b" \\", b"\\\\", b'a\\"   "', b"]]", b'["']
SCHEMAS = [
    '{"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}',
    '{"type": "array", "items": {"type": ["string", "null", "array"]}}',
    '{"type": "array", "items": {"type": "string", "pattern": "^ *a? *$"}, "uniqueItems": true}',
    '{"type": "string"}',
    '{"type": "object", "minProperties": 2, "additionalProperties": {"minimum": 3}}',
]


@pytest.fixture(scope="module")
def words() -> Vocabulary:
    """Bytes, an end token whose name has blanks, pieces with blanks, two padding ids."""
    tokens = [bytes([i]) for i in range(256)] + [b"<     >", *PIECES]
    return Vocabulary(tokens, eos_ids=[256], size=len(tokens) + 2)


@pytest.fixture(scope="module")
def tables(words) -> WhitespaceTables:
    return WhitespaceTables(words, BOUND)


@pytest.fixture(scope="module", params=SCHEMAS)
def grammar(request, words):
    return compile_spec(Spec.json_schema(request.param), words, Options(max_whitespace=BOUND))


def _longest(text: bytes) -> int:
    """The longest run of whitespace outside strings; the last string may be open."""
    outside = re.sub(rb'"(?:[^"\\]|\\.)*(?:"|\\?$)', b"|", text, flags=re.DOTALL)
    return max(map(len, re.findall(rb"[ \n\r\t]+", outside)), default=0)


def _text(matcher_tokens, words) -> bytes:
    return b"".join(words.tokens[t] for t in matcher_tokens if t != 256)


def _walk(grammar, choices, blanks):
    """Follow allowed tokens; where `blanks` says so and there is one, a token that begins with whitespace."""
    matcher, tokens, texts = grammar.matcher(), [], grammar.vocabulary.tokens
    for number, blank in zip(choices, blanks, strict=True):
        allowed = allowed_tokens(matcher.mask(), grammar.vocabulary.size).tolist()
        some = [t for t in allowed if texts[t][:1] in (b" ", b"\n", b"\t")] if blank else []
        token = (some or allowed)[number % len(some or allowed)]
        assert matcher.accept([token]) == 1, f"the mask offered {token} after {tokens}"
        tokens.append(token)
        if matcher.is_terminated:
            break
    return matcher, tokens


WALKS = st.lists(st.tuples(st.integers(0, 10_000), st.booleans()), min_size=1, max_size=30)


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.sampled_from([*b' \n\t"\\a}', *range(257, 257 + len(PIECES))]), max_size=12))
def test_tables_follow_the_text(words, tables, ids):
    """What a token does to the run, and the mask of a place, are those of the text itself."""
    place, text = 0, b""
    for token in ids:
        kept = tables.kept(place)
        for other in range(257, 257 + len(PIECES)):
            piece = words.tokens[other]
            if not (place >= 0 and b"\\" in piece.partition(b'"')[0]):  # no JSON text has one there
                fits = _longest(text + piece) <= BOUND
                assert (tables.after(place, other) is not None) == fits, (text, piece)
                assert kept is None or bool(kept.view(np.uint32)[other // 32] >> (other % 32) & 1) == fits
                assert kept is not None or fits
        if place >= 0 and b"\\" in words.tokens[token].partition(b'"')[0]:
            continue
        after = tables.after(place, token)
        if after is None:
            continue
        place, text = after, text + words.tokens[token]


@settings(max_examples=60, deadline=None)
@given(walk=WALKS)
def test_masks_are_those_of_a_grammar_that_counts(grammar, words, walk):
    """Another way to the same language: the bound written into the grammar, as inside structural tags."""
    counting = lower(grammar.spec.content, Options(max_whitespace=BOUND), count_whitespace=True).lark
    assert f"{{1,{BOUND}}}" in counting
    native = llguidance.LlguidanceGrammar(counting, words).matcher()
    other = Matcher(native, words, grammar.matcher().guard)
    matcher, tokens = grammar.matcher(), _walk(grammar, *zip(*walk, strict=True))[1]
    for token in tokens:
        assert np.array_equal(matcher.mask(), other.mask()), _text(tokens, words)
        assert matcher.is_accepting == other.is_accepting
        assert matcher.accept([token]) == other.accept([token]) == 1
    forced = matcher.forced_tokens()
    assert matcher.allows(forced) == len(forced)


@settings(max_examples=60, deadline=None)
@given(walk=WALKS)
def test_no_walk_and_nothing_accepted_runs_over_the_bound(grammar, words, walk):
    matcher, tokens = _walk(grammar, *zip(*walk, strict=True))
    text = _text(tokens, words)
    assert _longest(text) <= BOUND
    for token in range(257, 257 + len(PIECES)):
        if matcher.allows([token]):
            assert _longest(text + words.tokens[token]) <= BOUND


@settings(max_examples=60, deadline=None)
@given(walk=WALKS, data=st.data())
def test_rollback_and_clone_are_exact(grammar, walk, data):
    matcher, tokens = _walk(grammar, *zip(*walk, strict=True))
    count = data.draw(st.integers(0, len(tokens)))
    kept = tokens[: len(tokens) - count]
    clone = matcher.clone()
    matcher.rollback(count)
    fresh = grammar.matcher()
    assert fresh.accept(kept) == len(kept)
    assert np.array_equal(matcher.mask(), fresh.mask())
    for token in (32, 257, 258):
        assert matcher.allows([token]) == fresh.allows([token])
    assert len(clone) == len(tokens)
    clone.rollback(count)
    assert np.array_equal(clone.mask(), fresh.mask())
    assert matcher.accept(tokens[len(kept) :]) == count


@settings(max_examples=60, deadline=None)
@given(walk=WALKS, draft=st.lists(st.sampled_from([*b' \n"1}]', 257, 258, 259, 260]), min_size=1, max_size=8))
def test_draft_masks_and_batches_agree(grammar, words, walk, draft):
    matcher, tokens = _walk(grammar, *zip(*walk, strict=True))
    rows = allocate_mask(len(draft) + 1, words.size)
    filled = matcher.fill_draft_masks(draft, rows)
    plain, row = grammar.matcher(), allocate_mask(1, words.size)
    plain.accept(tokens)
    for i in range(filled + 1):
        fill_masks([plain], [0], row)
        assert np.array_equal(rows[i], row[0])
        assert i == len(draft) or plain.accept(draft[i : i + 1]) == (i < filled)


def test_a_refused_token_leaves_no_trace(words):
    """Whether the bound, the grammar or the guard refuses it."""
    schema = '{"type": "array", "items": {"type": "string"}, "uniqueItems": true}'
    matcher = compile_spec(Spec.json_schema(schema), words, Options(max_whitespace=BOUND)).matcher()
    assert matcher.accept(list(b'["a",  "b",  ')) == 13
    before = matcher.mask()
    four_blanks = 257 + PIECES.index(b"\n   ")
    for refused in ([four_blanks], [*b'"a"'], [*b"  "], [*b" 1"]):
        matcher.rollback(matcher.accept(refused))
        assert np.array_equal(matcher.mask(), before)
        assert len(matcher) == 13
    assert matcher.accept(list(b' "c"   ]')) == 8
    assert allowed_tokens(matcher.mask(), words.size).tolist() == [256]
    assert matcher.accept([32]) == 0
    assert matcher.accept([256]) == 1


def test_strings_keep_their_blanks_and_the_end_has_none(words):
    matcher = compile_spec(Spec.json_schema("true"), words, Options(max_whitespace=BOUND)).matcher()
    blanks = b" " * 90
    text = b'{"' + blanks + b'\\"\\n' + blanks + b'\\\\":   "' + blanks + b'"   }'
    assert matcher.accept_text(text)
    assert matcher.is_accepting
    assert not matcher.accept_text(b" ")


@pytest.mark.parametrize("schema", ['{"type": "object"}', '{"type": "array", "items": {"type": "integer"}}'])
def test_every_document_can_go_on_when_whitespace_is_spent(byte_vocabulary, schema):
    """At each place of a document with as many blanks as there may be, the next byte of the document is allowed."""
    grammar = compile_spec(Spec.json_schema(schema), byte_vocabulary, Options(max_whitespace=BOUND))
    parts = [b"{", b'"a"', b":", b"[", b"1", b",", b'""', b"]", b"}"]
    if "array" in schema:
        parts = [b"[", b"12", b",", b"3", b"]"]
    text = b"   ".join(parts)
    matcher = grammar.matcher()
    for byte in text:
        assert matcher.accept([byte]) == 1
    assert matcher.is_accepting


def test_a_vocabulary_that_needs_more_whitespace_is_told():
    vocabulary = Vocabulary([b"[", b" ", b" ]", b"<eos>"], eos_ids=[3])
    matcher = compile_spec(Spec.json_schema('{"maxItems": 0}'), vocabulary, Options(max_whitespace=1)).matcher()
    assert matcher.accept([0, 1]) == 2
    with pytest.raises(MatcherError, match="beyond the longest run"):
        matcher.mask()
    matcher.rollback(1)
    assert allowed_tokens(matcher.mask(), 4).tolist() == [1, 2]
    assert matcher.accept([2, 3]) == 2


def test_padding_and_special_tokens_stay_as_they_are(words, tables):
    for place in (-2, -1, 0, 1, 2, 3):
        kept = tables.kept(place)
        if kept is not None:
            assert {256, words.size - 1} <= set(allowed_tokens(kept, words.size).tolist())


def test_only_grammars_of_whole_documents_leave_the_bound_to_the_matcher(accepts):
    """Inside a tag the text before is no JSON, so the grammar counts there."""
    narrow, wide = Options(max_whitespace=3), Options(max_whitespace=5)
    document = Spec.json_schema(SCHEMAS[0])
    assert lower_spec(document, narrow).text == lower_spec(document, wide).text
    assert lower_spec(Spec.json_object(), narrow).max_whitespace == 3
    tag = {"begin": "<t>", "schema": {"type": "object"}, "end": "</t>"}
    tags = Spec.structural_tag({"structures": [tag], "triggers": ["<t>"]})
    assert lower_spec(tags, narrow).max_whitespace is None
    for spec, before, after in ((document, "", ""), (tags, 'a     "b     <t>', "</t>     c")):
        assert accepts(spec, before + '{   "b": "     "}' + after, max_whitespace=3)
        assert not accepts(spec, before + '{    "b": ""}' + after, max_whitespace=3)
        assert accepts(spec, before + '{"b":""}' + after, max_whitespace=0)
        assert not accepts(spec, before + '{ "b":""}' + after, max_whitespace=0)


@pytest.mark.parametrize("number", [{"multipleOf": 1}, {"type": "number", "multipleOf": 0.5}, {"minimum": 3.5}])
@pytest.mark.parametrize("bound", [0, BOUND])
def test_numbers_of_the_librarys_own_end_where_the_text_around_them_goes_on(byte_vocabulary, number, bound):
    """Their grammars are nested ones: the library gives up at their end if they skip other blanks than the rest does."""
    schema = {"type": "object", "additionalProperties": number}
    tag = Spec.structural_tag({"structures": [{"begin": "<t>", "schema": schema, "end": "</t>"}], "triggers": ["<t>"]})
    texts = (
        [b'{"a":8}', b'{"a":8,"b":9.5}'] if "multipleOf" not in number or bound == 0 else [b'{"a" : 8 , "b":  9   }']
    )
    for spec, before, after in ((Spec.json_schema(schema), b"", b""), (tag, b"<t>", b"</t>.")):
        for text in texts:
            matcher = compile_spec(spec, byte_vocabulary, Options(max_whitespace=bound)).matcher()
            fits = number != {"multipleOf": 1} or b".5" not in text
            assert matcher.accept_text(before + text + after) == fits
