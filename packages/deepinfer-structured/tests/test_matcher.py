"""The matcher's state: accept, roll back, masks, the end token, clones, draft blocks."""

from __future__ import annotations

import numpy as np
import pytest
from deepinfer_structured import (
    MatcherError,
    Options,
    Spec,
    Vocabulary,
    allocate_mask,
    allowed_tokens,
    batch,
    compile_spec,
    fill_masks,
)
from hypothesis import given, settings
from hypothesis import strategies as st

SCHEMAS = [
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["b"]},
    {"type": "array", "items": {"type": "string", "maxLength": 3}, "uniqueItems": True, "maxItems": 4},
    {
        "type": "object",
        "patternProperties": {"^a": {"type": "number"}},
        "additionalProperties": {"enum": ["a", 1, None]},
    },
]


def _walk(grammar, choices):
    """Follow allowed tokens, chosen by numbers."""
    matcher, tokens = grammar.matcher(), []
    for number in choices:
        allowed = allowed_tokens(matcher.mask(), grammar.vocabulary.size)
        token = int(allowed[number % len(allowed)])
        assert matcher.accept([token]) == 1, f"the mask offered {token} after {tokens}"
        tokens.append(token)
        if matcher.is_terminated:
            break
    return matcher, tokens


@pytest.fixture(scope="module", params=range(len(SCHEMAS)))
def grammar(request, vocabulary):
    return compile_spec(Spec.json_schema(SCHEMAS[request.param]), vocabulary)


def test_mask_holds_exactly_the_tokens_that_are_accepted(grammar):
    matcher, size = grammar.matcher(), grammar.vocabulary.size
    for token in [ord("{"), ord('"'), ord("a")]:
        mask = set(allowed_tokens(matcher.mask(), size).tolist())
        real = {t for t in range(size) if matcher.allows([t]) == 1}
        assert mask == real or (matcher.guard is not None and mask <= real)
        if matcher.accept([token]) != 1:
            break


@settings(max_examples=40, deadline=None)
@given(choices=st.lists(st.integers(0, 10_000), min_size=1, max_size=40), data=st.data())
def test_rollback_is_exact(grammar, choices, data):
    matcher, tokens = _walk(grammar, choices)
    count = data.draw(st.integers(0, len(tokens)))
    matcher.rollback(count)
    fresh = grammar.matcher()
    assert fresh.accept(tokens[: len(tokens) - count]) == len(tokens) - count
    assert np.array_equal(matcher.mask(), fresh.mask())
    assert matcher.is_accepting == fresh.is_accepting
    assert matcher.accept(tokens[len(tokens) - count :]) == count


@settings(max_examples=40, deadline=None)
@given(
    choices=st.lists(st.integers(0, 10_000), max_size=20), draft=st.lists(st.integers(0, 285), min_size=1, max_size=8)
)
def test_draft_masks_are_those_of_each_position(grammar, choices, draft):
    matcher, tokens = _walk(grammar, choices)
    rows = allocate_mask(len(draft) + 1, grammar.vocabulary.size)
    accepted = matcher.fill_draft_masks(draft, rows)
    assert len(matcher) == len(tokens)
    plain = grammar.matcher()
    plain.accept(tokens)
    for i in range(accepted + 1):
        assert np.array_equal(rows[i], plain.mask())
        if i < len(draft):
            assert plain.accept([draft[i]]) == (1 if i < accepted else 0)


def test_end_token_is_accepted_once_and_rolled_back(byte_vocabulary):
    matcher = compile_spec(
        Spec.json_schema({"type": "integer", "maximum": 20, "minimum": 10}), byte_vocabulary
    ).matcher()
    assert matcher.accept([256]) == 0
    assert matcher.accept([*b"12", 256, 256]) == 3
    assert matcher.is_terminated
    assert not matcher.is_accepting
    assert allowed_tokens(matcher.mask(), 257).tolist() == [256]
    matcher.rollback(2)
    assert len(matcher) == 1
    assert not matcher.is_terminated
    assert set(allowed_tokens(matcher.mask(), 257).tolist()) == set(b"0123456789")
    with pytest.raises(ValueError, match="cannot roll back 2"):
        matcher.rollback(2)


def test_clone_is_independent(grammar):
    matcher, _ = _walk(grammar, [3, 5, 7])
    before, other = matcher.mask(), matcher.clone()
    allowed = allowed_tokens(before, grammar.vocabulary.size)
    other.accept([int(allowed[-1])])
    assert np.array_equal(matcher.mask(), before)
    assert len(other) == len(matcher) + 1


def test_padding_and_bad_ids_are_refused(vocabulary):
    matcher = compile_spec(Spec.json_object(), vocabulary).matcher()
    assert matcher.accept([vocabulary.size - 1]) == matcher.accept([-1]) == matcher.accept([10**9]) == 0
    assert vocabulary.size - 1 not in allowed_tokens(matcher.mask(), vocabulary.size)


def test_forced_tokens_follow_the_only_way(byte_vocabulary):
    schema = {
        "type": "object",
        "properties": {"answer": {"const": 7}},
        "required": ["answer"],
        "additionalProperties": False,
    }
    matcher = compile_spec(Spec.json_schema(schema), byte_vocabulary).matcher()
    matcher.accept(list(b'{"'))
    forced = matcher.forced_tokens()
    assert bytes(forced).startswith(b"answer")
    assert matcher.allows(forced) == len(forced)


@pytest.mark.parametrize("alone", [-1.0, 60.0])
def test_batch_rows_equal_single_rows(vocabulary, monkeypatch, alone):
    """Whether the library's threads fill them or the calling one."""
    monkeypatch.setattr(batch, "_ALONE", alone)
    grammars = [compile_spec(Spec.json_schema(s), vocabulary) for s in SCHEMAS]
    matchers = [_walk(g, [i, 2 * i + 1, 5])[0] for g in grammars for i in range(6)]
    matchers += [compile_spec(Spec.regex("ab"), vocabulary).matcher() for _ in range(3)]
    assert [m.accept(list(b"ab")) for m in matchers[-2:]] == [2, 2]
    assert matchers[-1].accept([256]) == 1
    out = allocate_mask(len(matchers) + 1, vocabulary.size)
    rows = list(range(len(matchers), 0, -1))
    fill_masks(matchers, rows, out, threads=2)
    assert (out[0] == -1).all()
    for matcher, row in zip(matchers, rows, strict=True):
        assert np.array_equal(out[row], matcher.mask())


def test_batch_refuses_a_wrong_buffer(vocabulary):
    matcher = compile_spec(Spec.json_object(), vocabulary).matcher()
    with pytest.raises(ValueError, match="contiguous int32"):
        fill_masks([matcher], [0], np.zeros((1, 4), np.int64))
    with pytest.raises(ValueError, match="1 matchers but 2 rows"):
        fill_masks([matcher], [0, 1], allocate_mask(2, vocabulary.size))
    for row in (-1, 2):
        with pytest.raises(ValueError, match=r"within 0\.\.1"):
            fill_masks([matcher], [row], allocate_mask(2, vocabulary.size))
    with pytest.raises(ValueError, match="buffer size"):
        fill_masks([matcher], [0], allocate_mask(1, vocabulary.size + 32))
    fill_masks([], [], allocate_mask(1, vocabulary.size))


def test_vocabulary_names_what_is_wrong():
    with pytest.raises(ValueError, match="at least one end-of-sequence"):
        Vocabulary([b"a"], eos_ids=[])
    with pytest.raises(ValueError, match="out of range"):
        Vocabulary([b"a"], eos_ids=[3])
    with pytest.raises(ValueError, match="smaller"):
        Vocabulary([b"a", b"b"], eos_ids=[0], size=1)


def test_a_draft_into_a_dead_end_is_cut_before_it(byte_vocabulary):
    """Two texts fit the items and three distinct ones are asked for: after the second nothing can be said."""
    item = {"type": "string", "pattern": "^a{0,1}$"}
    schema = {"type": "array", "prefixItems": [item] * 3, "uniqueItems": True, "minItems": 3, "maxItems": 3}
    matcher = compile_spec(Spec.json_schema(schema), byte_vocabulary, Options(max_whitespace=0)).matcher()
    draft = list(b'["a","","a')
    rows = allocate_mask(len(draft) + 1, byte_vocabulary.size)
    filled = matcher.fill_draft_masks(draft, rows)
    assert matcher.allows(draft) > filled
    assert len(matcher) == 0
    assert rows[: filled + 1].any(axis=1).all()
    assert matcher.accept(draft[: filled + 1]) == filled + 1
    with pytest.raises(MatcherError, match="no distinct array item"):
        matcher.mask()
