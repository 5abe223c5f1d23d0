"""The tokenizer of a model: text to ids, ids to text, the bytes of each id, and which ids are special."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_offline.engine.base import EngineStartError, RequestError
from deepinfer_offline.text.bound import TokenBound, token_bound
from deepinfer_offline.text.chat import ChatTemplate
from deepinfer_offline.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend


class Tokenizer:
    """A fast (Rust) tokenizer with what the engine needs around it.

    Args:
        backend: a `tokenizers.Tokenizer`.
        eos_ids: ids that end an answer.
        bos_token, eos_token: their text, for chat templates.
        chat_template: renders conversations, or None.
        name: what to call the model in messages.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        eos_ids: Iterable[int],
        bos_token: str | None = None,
        eos_token: str | None = None,
        chat_template: Any = None,
        name: str = "model",
    ) -> None:
        self.backend, self.name = backend, name
        self.eos_ids = frozenset(eos_ids)
        self.bos_token, self.eos_token = bos_token, eos_token
        self.chat_template = chat_template
        self.chat_refusal: RequestError | None = None  # why there is no template, if there is a better reason than none
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._literal = frozenset(added)

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer knows, added tokens included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def max_id(self) -> int:
        """The highest id the tokenizer knows."""
        return max(self.backend.get_vocab(with_added_tokens=True).values())

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The bytes of every id."""
        tokens = {token_id: text for text, token_id in self.backend.get_vocab(with_added_tokens=True).items()}
        kind = "sentencepiece" if "ByteFallback" in repr(self.backend.decoder) else "byte_level"
        return Vocabulary(tokens, kind, self._literal)

    @cached_property
    def _bound(self) -> TokenBound | None:
        return token_bound(self.backend)

    def fewest_tokens(self, text: str) -> int:
        """A number of ids that a text has at least, known from its size: encoding takes over 100 times its memory.

        Returns:
            0 for a tokenizer that may drop text.
        """
        return self._bound.fewest_tokens(text) if self._bound is not None else 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; `add_special_tokens` adds what the model's own tokenizer adds, e.g. a start token.

        Raises:
            RequestError: not a text, half a character (a lone surrogate), or the tokenizer cannot spell it.
        """
        return self._ids(text, add_special_tokens, "prompt")

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Ids of many texts, encoded in parallel."""
        encoded = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [item.ids for item in encoded]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids. Bytes that are not UTF-8 become U+FFFD."""
        return self.token_bytes(token_ids, skip_special_tokens=skip_special_tokens).decode("utf-8", errors="replace")

    def token_bytes(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> bytes:
        """Bytes of ids, one after the other."""
        hidden = self.special_ids if skip_special_tokens else frozenset()
        vocabulary = self.vocabulary
        return b"".join([vocabulary[token] for token in token_ids if token not in hidden])

    def encode_chat(self, messages: Sequence[dict[str, Any]], **options: Any) -> list[int]:
        """Ids of a conversation, ready for the model to answer.

        Args:
            messages: OpenAI chat messages.
            options: `tools`, `add_generation_prompt` (default True), and variables of the template.

        Raises:
            RequestError: no template, the template refuses the conversation, or `encode` refuses its text.
        """
        if self.chat_template is None:
            raise self.chat_refusal or ChatTemplate.missing(self.name)
        return self._ids(self.chat_template.render(messages, **options), False, "messages")

    def _ids(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except Exception as error:  # the Rust side raises TypeError and plain Exception
            raise RequestError(_unreadable(text, error, self.name), param=param) from error


def _unreadable(text: Any, error: Exception, name: str) -> str:
    """Why a text has no ids."""
    if not isinstance(text, str):
        return f"a prompt must be text, got {type(text).__name__} {text!r:.80}"
    half = next((place for place, letter in enumerate(text) if "\ud800" <= letter <= "\udfff"), None)
    if half is None:
        return f"the tokenizer of {name} cannot read this text: {error}"
    return (
        f"the text holds half a character, the lone surrogate U+{ord(text[half]):04X} at {half}, which no text in UTF-8 "
        "has; write the whole character"
    )


def load_tokenizer(path: Path, *, name: str | None = None) -> Tokenizer | None:
    """Load the tokenizer of a Hugging Face folder or a GGUF file.

    Returns:
        None if the folder has none: the model then takes and gives token ids only.

    Raises:
        EngineStartError: the tokenizer's files cannot be read.
    """
    from deepinfer_offline.text import load

    try:
        return load.from_gguf(path, name) if path.suffix == ".gguf" else load.from_folder(path, name)
    except EngineStartError:
        raise
    except Exception as error:  # damaged files hold values of any type, and the Rust side raises plain Exception
        raise EngineStartError(f"the tokenizer of {path} cannot be read: {error}") from error
