from __future__ import annotations

import json
import math

from deepinfer_offline.engine.base import PositionLogprobs, TokenLogprob
from deepinfer_offline.job.codec import dumps
from deepinfer_offline.job.logprobs import chat_logprobs, clamp, completion_logprobs
from hypothesis import given
from hypothesis import strategies as st


def token(raw, logprob=-1.0, rank=1):
    return TokenLogprob(rank, logprob, rank, raw.decode(errors="replace"), raw)


def position(raw, logprob=-1.0, top=()):
    return PositionLogprobs(token(raw, logprob), top)


def test_a_character_split_over_tokens_keeps_offsets_and_bytes():
    euro = "€".encode()
    parts = [position(b"a"), position(euro[:1]), position(euro[1:]), position(b"b")]
    shape = completion_logprobs(parts)
    assert shape["text_offset"] == [0, 1, 1, 2], "offsets in `a€b`"
    assert [entry["bytes"] for entry in chat_logprobs(parts)["content"]] == [[97], [0xE2], [0x82, 0xAC], [98]]


def test_the_chat_shape():
    top = (token(b"b", -0.1, 1), token(b"a", -2.0, 2))
    assert chat_logprobs([position(b"a", -2.0, top)]) == {
        "content": [
            {
                "token": "a",
                "logprob": -2.0,
                "bytes": [97],
                "top_logprobs": [
                    {"token": "b", "logprob": -0.1, "bytes": [98]},
                    {"token": "a", "logprob": -2.0, "bytes": [97]},
                ],
            }
        ],
        "refusal": None,
    }


def test_the_completions_shape_with_an_echoed_prompt():
    shape = completion_logprobs([None, position(b"b", -2.0, (token(b"x", -0.5),))], [("a", b"a")])
    assert shape == {
        "tokens": ["a", "b"],
        "token_logprobs": [None, -2.0],
        "top_logprobs": [None, {"x": -0.5, "b": -2.0}],
        "text_offset": [0, 1],
    }


def test_parts_of_characters_are_told_apart():
    first, second = b"\xf0\x9f", b"\xe2"
    shape = completion_logprobs([position(first, -0.1, (token(first, -0.1, 1), token(second, -4.0, 2)))])
    assert shape["tokens"] == ["bytes:\\xf0\\x9f"]
    assert shape["top_logprobs"] == [{"bytes:\\xf0\\x9f": -0.1, "bytes:\\xe2": -4.0}]


def test_only_the_drawn_token_was_asked_for():
    assert completion_logprobs([position(b"a")])["top_logprobs"] is None


@given(st.floats())
def test_every_logprob_is_a_json_number(value):
    text = dumps(chat_logprobs([position(b"a", value, (token(b"b", value),))]))
    found = json.loads(text, parse_constant=lambda name: 1 / 0)["content"][0]
    assert found["logprob"] >= -9999.0
    assert math.isfinite(found["top_logprobs"][0]["logprob"])
    assert clamp(value) == value or value < -9999 or not math.isfinite(value)
