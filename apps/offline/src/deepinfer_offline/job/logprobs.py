"""Log-probabilities in the two shapes of OpenAI's API."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from typing import Any

from deepinfer_offline.engine.base import PositionLogprobs, TokenLogprob

LOWEST = -9999.0
"""Stands for the logarithm of zero, which JSON cannot write."""


def chat_logprobs(positions: Sequence[PositionLogprobs]) -> dict[str, Any]:
    """The `logprobs` of a chat choice: per token its text, bytes and log-probability, and the likeliest ones."""
    content = [
        {**_token(position.chosen), "top_logprobs": [_token(token) for token in position.top]} for position in positions
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    positions: Sequence[PositionLogprobs | None], prompt: Sequence[tuple[str, bytes]] = ()
) -> dict[str, Any]:
    """The `logprobs` of a completion choice: parallel lists.

    Args:
        positions: of the tokens in the choice's text, in order. None for the first token of a prompt, which nothing
            predicts.
        prompt: text and bytes of the tokens whose position is None.

    Returns:
        `tokens`, `token_logprobs`, `top_logprobs` and `text_offset`; offsets count characters of the choice's text.
        A token that holds a part of a character is named by its bytes, `bytes:\\xf0\\x9f`: as text, they would all be one.
    """
    shape: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offset = 0
    unpredicted = iter(prompt)
    for position in positions:
        if position is None:
            text, raw = next(unpredicted)
            number, top = None, None
        else:
            text, raw = _name(position.chosen), position.chosen.raw
            number = clamp(position.chosen.logprob)
            top = _by_name((position.chosen, *position.top)) if position.top else None
        shape["tokens"].append(text)
        shape["token_logprobs"].append(number)
        shape["top_logprobs"].append(top)
        shape["text_offset"].append(offset)
        offset += len(decoder.decode(raw))
    if not any(shape["top_logprobs"]):
        return {**shape, "top_logprobs": None}
    return shape


def clamp(logprob: float) -> float:
    """A finite number for any log-probability: masked tokens have minus infinity, or no number at all."""
    return max(float(logprob), LOWEST) if math.isfinite(logprob) else LOWEST


def _by_name(tokens: Sequence[TokenLogprob]) -> dict[str, float]:
    """Log-probabilities by token, the likeliest first. Of tokens with the same bytes the likeliest counts."""
    shown: dict[str, float] = {}
    for token in sorted(tokens, key=lambda token: -clamp(token.logprob)):
        shown.setdefault(_name(token), clamp(token.logprob))
    return shown


def _name(token: TokenLogprob) -> str:
    try:
        token.raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.raw)
    return token.decoded


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.decoded, "logprob": clamp(token.logprob), "bytes": list(token.raw)}
