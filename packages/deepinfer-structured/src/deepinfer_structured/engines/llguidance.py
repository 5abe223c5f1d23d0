"""llguidance behind `EngineMatcher`. The library accepts no text that its grammar forbids: it is the primary engine."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from deepinfer_structured.bitmask import Mask, address, allocate_mask
from deepinfer_structured.errors import EngineMissing, InvalidSpec, LimitExceeded, MatcherError, UnsatisfiableSchema
from deepinfer_structured.vocab import Vocabulary

try:
    import llguidance as _llguidance
except ImportError:
    _llguidance: Any = None

available = _llguidance is not None
version = getattr(_llguidance, "__version__", "") if available else ""
# Before 1.8 a skipped expression could match again and again at one place, so its bounds meant nothing.
bounds_whitespace = available and tuple(int(p) for p in version.split(".")[:2] if p.isdigit()) >= (1, 8)
_tokenizers: weakref.WeakKeyDictionary[Vocabulary, Any] = weakref.WeakKeyDictionary()
_LIMIT_WORDS = ("too complex", "too large", "too many", "limit", "fuel", "exceed")


class _Tokens:
    """The shape of a tokenizer that the library reads."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_ids[0]
        self.tokens = vocabulary.padded_tokens  # the library sizes its masks by this list, not by n_vocab
        self.special_token_ids = list(vocabulary.special_ids)
        # Forced text is encoded while masks are filled, the same few texts over and over, and under the interpreter lock.
        self._encode = functools.lru_cache(maxsize=16_384)(vocabulary.encode or _greedy_encoder(vocabulary))

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("text only")
        return list(self._encode(text))


def _greedy_encoder(vocabulary: Vocabulary) -> Callable[[str], list[int]]:
    """Encode by the longest token at each place."""
    special = set(vocabulary.special_ids)
    ids = {token: i for i, token in reversed(list(enumerate(vocabulary.tokens))) if token and i not in special}
    longest = max(map(len, ids), default=1)

    def encode(text: str) -> list[int]:
        data, out, start = text.encode(), [], 0
        while start < len(data):
            widths = range(min(longest, len(data) - start), 0, -1)
            width = next((w for w in widths if data[start : start + w] in ids), 0)
            if width:
                out.append(ids[data[start : start + width]])
            start += width or 1
        return out

    return encode


def require() -> Any:
    """The library, or `EngineMissing` saying how to get it."""
    if _llguidance is None:
        raise EngineMissing("this constraint needs llguidance: pip install llguidance")
    return _llguidance


def tokenizer(vocabulary: Vocabulary) -> Any:
    """The library's tokenizer of a vocabulary, made once."""
    made = _tokenizers.get(vocabulary)
    if made is None:
        lib = require()
        wrapper = lib.TokenizerWrapper(_Tokens(vocabulary))
        made = lib.LLTokenizer(wrapper, n_vocab=vocabulary.size, eos_token=list(vocabulary.eos_ids))
        _tokenizers[vocabulary] = made
    return made


@functools.cache
def _limits() -> Any:
    """Wider than the library's defaults: a grammar that compiles should not give up in the middle of a text."""
    return require().LLParserLimits(
        max_items_in_row=20_000,
        initial_lexer_fuel=10_000_000,
        step_lexer_fuel=4_000_000,
        step_max_items=1_000_000,
        max_grammar_size=2_000_000,
        verbose_errors=False,
    )


class LlguidanceMatcher:
    """One sequence."""

    engine = "llguidance"
    __slots__ = ("native",)

    def __init__(self, native: Any) -> None:
        self.native = native

    def accept(self, token_ids: Sequence[int]) -> int:
        count = self.native.try_consume_tokens(list(token_ids))
        self.check()
        return count

    def takes(self, token_ids: list[int]) -> bool:
        return self.native.validate_tokens(token_ids) == len(token_ids)

    def rollback(self, count: int) -> None:
        if not self.native.rollback(count):
            raise MatcherError(f"cannot roll back {count} tokens: {self.native.get_error()}")

    def fill(self, row: Mask) -> None:
        self.native.unsafe_compute_mask_ptr(address(row), row.nbytes)
        if self.native.is_error():
            self.check()

    def forced(self) -> list[int]:
        return self.native.compute_ff_tokens()

    def accepting(self) -> bool:
        return self.native.is_accepting()

    def stopped(self) -> bool:
        return self.native.is_stopped()

    def clone(self) -> LlguidanceMatcher:
        return LlguidanceMatcher(self.native.deep_copy())

    def check(self) -> None:
        """Raises MatcherError once the library has given up; its masks are those of an ended text then."""
        if self.native.is_error():
            raise MatcherError(self.native.get_error())


class LlguidanceGrammar:
    """A prototype matcher; every sequence starts from a copy of it."""

    def __init__(self, text: str, vocabulary: Vocabulary) -> None:
        lib = require()
        self._prototype = lib.LLMatcher(tokenizer(vocabulary), text, log_level=0, limits=_limits())
        if self._prototype.is_error():
            message = _first_line(self._prototype.get_error())
            limited = any(word in message.lower() for word in _LIMIT_WORDS)
            raise (LimitExceeded if limited else InvalidSpec)(message)
        self._check_first_mask(vocabulary)

    def _check_first_mask(self, vocabulary: Vocabulary) -> None:
        """Compute the mask of the first token: an empty language shows here, and the lexer's first states are made."""
        row = allocate_mask(1, vocabulary.size)[0]
        first = self._prototype.deep_copy()
        first.unsafe_compute_mask_ptr(address(row), row.nbytes)
        if first.is_error():
            reason = _first_line(first.get_error())
            raise LimitExceeded(f"no text can begin, or telling which can is too costly ({reason})")
        if first.stop_reason() in ("NoExtension", "NoExtensionBias") and not first.is_accepting():
            raise UnsatisfiableSchema("no text fits the constraint")
        if not row.any():
            raise UnsatisfiableSchema("no text fits the constraint")

    def matcher(self) -> LlguidanceMatcher:
        return LlguidanceMatcher(self._prototype.deep_copy())


def _first_line(message: str) -> str:
    return message.strip().split("\n")[0][:500]


@functools.cache
def executor(threads: int) -> Any:
    """A thread pool of the library for parallel mask filling."""
    return require().LLExecutor(threads)
