"""Follows the text of one answer that has stop strings, token by token."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer_offline.text.detokenizer import Detokenizer
from deepinfer_offline.text.stops import Stop, StopMatcher, tokens_needed
from deepinfer_offline.text.tokenizer import Tokenizer


class TextWatch:
    """The text so far, how far each token reaches in it, and the first stop string.

    The rule for what an answer keeps when a stop string is found: the text ends before the stop string, or after it
    with `include_stop`; the tokens are the shortest prefix whose text covers that text. So a token that holds the last
    kept character is kept even if the stop string begins inside it, and tokens that only hold parts of the stop string
    are not.

    Args:
        tokenizer: gives the bytes of tokens.
        stops: non-empty stop strings, at least one.
        min_tokens: stop strings that end within the text of the first so many tokens do not count.
        skip_special_tokens: leave special tokens out of the text.
        include_stop: keep the stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        *,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._matcher = StopMatcher(stops)
        self._min_tokens, self._include = min_tokens, include_stop
        self.text = ""
        self.ends: list[int] = []

    def push(self, token_id: int) -> Stop | None:
        """Add a token; the stop string that it completes, if any."""
        seen = len(self.text)
        self.text += self._detokenizer.push(token_id)
        self.ends.append(len(self.text))
        if len(self.ends) <= self._min_tokens or len(self.text) == seen:
            return None
        return self._matcher.find(self.text, seen)

    def cut(self, stop: Stop) -> tuple[str, int]:
        """The kept text and how many tokens it needs."""
        text = self.text[: stop.end if self._include else stop.start]
        return text, tokens_needed(self.ends, len(text))
