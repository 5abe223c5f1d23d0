"""Detokenizing and stop strings: exact for any cut into tokens, whatever characters they split."""

from __future__ import annotations

from deepinfer_offline.text.detokenizer import Detokenizer
from deepinfer_offline.text.stops import Stop, StopMatcher, tokens_needed
from deepinfer_offline.text.tokenizer import Tokenizer
from deepinfer_offline.text.vocabulary import byte_characters
from deepinfer_offline.text.watch import TextWatch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

ALPHABET = {byte: character for character, byte in byte_characters().items()}
PIECES = [b"a", b"b", b"ab", b"ba", b"aab", "é".encode(), "é".encode()[:1], "é".encode()[1:], "🌍".encode()[:2]]
PIECES += ["🌍".encode()[2:], b"b" + "é".encode()[:1], "é".encode()[1:] + b"a", "🌍".encode(), b" ", b"\xff"]


def pieces_tokenizer() -> Tokenizer:
    """One token a piece: several of them cut characters."""
    vocab = {"".join(ALPHABET[byte] for byte in piece): place for place, piece in enumerate(PIECES)}
    backend = Backend(models.WordLevel(vocab=vocab, unk_token="a"))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend, eos_ids=[len(PIECES)])


TOKENIZER = pieces_tokenizer()
SPECIAL = len(PIECES)
ids_strategy = st.lists(st.integers(0, SPECIAL), max_size=14)
stops_strategy = st.lists(st.text(alphabet="ab é🌍", min_size=1, max_size=4), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(ids_strategy, st.booleans())
def test_incremental_text_equals_decoding_at_once(ids: list[int], skip: bool) -> None:
    detokenizer = Detokenizer(TOKENIZER, skip_special_tokens=skip)
    text = ""
    for count, token in enumerate(ids, 1):
        text += detokenizer.push(token)
        whole = TOKENIZER.backend.decode(ids[:count], skip_special_tokens=skip)
        assert whole.startswith(text)
        assert set(whole[len(text) :]) <= {"\ufffd"}  # only the start of a character is held back
    assert text + detokenizer.finish() == TOKENIZER.backend.decode(ids, skip_special_tokens=skip)


def first_stop(text: str, stops: list[str]) -> Stop | None:
    """Every end from left to right, longest first: the definition, slowly."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return Stop(stop, end - len(stop), end)
    return None


@settings(max_examples=300, deadline=None)
@given(ids_strategy, stops_strategy, st.booleans())
def test_what_is_found_does_not_depend_on_the_tokens(ids: list[int], stops: list[str], include: bool) -> None:
    watch = TextWatch(TOKENIZER, stops, include_stop=include)
    found, used = None, 0
    for token in ids:
        found, used = watch.push(token), used + 1
        if found:
            break
    wanted = first_stop(watch.text, stops)
    assert found == wanted
    if found is None:
        return
    text, kept = watch.cut(found)
    assert text == watch.text[: found.end if include else found.start]
    assert not any(stop in text for stop in stops) or include
    assert kept <= used
    assert TOKENIZER.decode(ids[:kept]).startswith(text)
    if kept:
        before = Detokenizer(TOKENIZER)
        assert len(before.extend(ids[: kept - 1])) < len(text)  # one token fewer does not cover the text
    else:
        assert text == ""


@settings(max_examples=200, deadline=None)
@given(ids_strategy, stops_strategy, st.integers(0, 6))
def test_min_tokens_hides_stops_that_end_inside_the_first_tokens(ids: list[int], stops: list[str], least: int) -> None:
    watch = TextWatch(TOKENIZER, stops, min_tokens=least)
    for count, token in enumerate(ids, 1):
        seen = len(watch.text)
        found = watch.push(token)
        if count <= least:
            assert found is None
            continue
        ends = [end for end in range(seen + 1, len(watch.text) + 1) if any(watch.text[:end].endswith(s) for s in stops)]
        assert (found.end if found else None) == (ends[0] if ends else None)
        if found:
            break


def test_a_stop_string_inside_a_token_cuts_the_text_and_keeps_the_token() -> None:
    watch = TextWatch(TOKENIZER, ["ab"])
    assert watch.push(PIECES.index(b" ")) is None
    stop = watch.push(PIECES.index(b"aab"))
    assert stop == Stop("ab", 2, 4)
    assert watch.cut(stop) == (" a", 2)
    assert TextWatch(TOKENIZER, ["b"]).push(PIECES.index(b"b")) == Stop("b", 0, 1)


def test_of_two_stops_the_first_complete_one_wins_and_then_the_longest() -> None:
    assert StopMatcher(["bcd", "c"]).find("abcd", 0) == Stop("c", 2, 3)
    assert StopMatcher(["c", "abc"]).find("abcd", 0) == Stop("abc", 0, 3)


def test_tokens_needed() -> None:
    assert tokens_needed([1, 1, 3, 3, 5], 0) == 0
    assert tokens_needed([1, 1, 3, 3, 5], 1) == 1
    assert tokens_needed([1, 1, 3, 3, 5], 2) == 3
    assert tokens_needed([1, 1, 3, 3, 5], 3) == 3
    assert tokens_needed([1, 1, 3, 3, 5], 5) == 5
