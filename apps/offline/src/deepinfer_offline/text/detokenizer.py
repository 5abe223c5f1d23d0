"""Ids to text, one token at a time, exact for characters that are split over tokens."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from deepinfer_offline.text.tokenizer import Tokenizer


class Detokenizer:
    """Builds the text of one answer.

    After every `push` the text is what `Tokenizer.decode` gives for the ids so far, less the start of a character
    whose last bytes have not come yet; `finish` adds that as U+FFFD.

    Args:
        tokenizer: where the bytes of tokens come from.
        skip_special_tokens: leave special tokens out.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._vocabulary = tokenizer.vocabulary
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes, often none for parts of a character."""
        if token_id in self._hidden:
            return ""
        return self._decoder.decode(self._vocabulary[token_id])

    def finish(self) -> str:
        """What is left: U+FFFD for a character that never got its last bytes."""
        return self._decoder.decode(b"", final=True)

    def extend(self, token_ids: Sequence[int]) -> str:
        """Push many tokens."""
        return "".join([self.push(token) for token in token_ids])
