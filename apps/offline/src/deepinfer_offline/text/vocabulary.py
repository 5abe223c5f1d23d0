"""The bytes of every token, so that text can be built and cut exactly, byte by byte."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@cache
def byte_characters() -> dict[str, int]:
    """The 256 printable characters that byte-level BPE writes its vocabulary with, mapped back to bytes (GPT-2)."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in kept}
    shifted = (byte for byte in range(256) if byte not in kept)
    table.update({chr(256 + place): byte for place, byte in enumerate(shifted)})
    return table


def byte_level_bytes(token: str) -> bytes:
    """Bytes of a byte-level BPE token. A token with a character outside the alphabet stands for its own UTF-8."""
    table = byte_characters()
    try:
        return bytes([table[character] for character in token])
    except KeyError:
        return token.encode("utf-8", errors="replace")


def sentencepiece_bytes(token: str) -> bytes:
    """Bytes of a SentencePiece token: U+2581 is a space, `<0x0A>` is one byte."""
    match = _BYTE_TOKEN.fullmatch(token)
    if match:
        return bytes([int(match[1], 16)])
    return token.replace("▁", " ").encode("utf-8", errors="replace")


class Vocabulary:
    """Bytes by token id, decoded on first use.

    Args:
        tokens: token text by id, as the tokenizer stores it.
        kind: `byte_level` or `sentencepiece`.
        literal: ids of added tokens: their stored text is their text.
    """

    def __init__(self, tokens: Mapping[int, str], kind: str, literal: frozenset[int]) -> None:
        self._tokens, self._literal = tokens, literal
        self._convert = byte_level_bytes if kind == "byte_level" else sentencepiece_bytes
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        """Bytes of a token; empty for an id that the tokenizer does not have (padding of the model's vocabulary)."""
        found = self._known.get(token_id)
        if found is None:
            text = self._tokens.get(token_id, "")
            found = text.encode() if token_id in self._literal else self._convert(text)
            self._known[token_id] = found
        return found
