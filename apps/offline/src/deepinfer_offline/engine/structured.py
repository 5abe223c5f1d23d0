"""Structured output for the engines: from what a request says to a compiled grammar, off the engine's thread."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from deepinfer_offline.engine.base import RequestError
from deepinfer_offline.sampling.params import StructuredOutputs

if TYPE_CHECKING:
    from deepinfer_structured import Grammar, Spec, Vocabulary

    from deepinfer_offline.text.tokenizer import Tokenizer

_KEPT_GRAMMARS = 512


class GrammarCompiler:
    """Compiles structured outputs on threads of its own and keeps the results, so equal schemas compile once.

    Args:
        tokenizer: the model's tokenizer.
        vocab_size: width of the logits.
        threads: compilations at a time.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, *, threads: int = 1) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="deepinfer-grammar")
        self._futures: OrderedDict[Spec, Future[Grammar]] = OrderedDict()
        self._vocabulary: Vocabulary | None = None
        self._lock = threading.Lock()

    def submit(self, wanted: StructuredOutputs) -> Future[Grammar]:
        """Start compiling. The future's exception is a RequestError if the request is to blame.

        Raises:
            RequestError: no tokenizer, the package or its grammar library is missing, or a malformed specification.
        """
        if self._tokenizer is None:
            raise RequestError("structured output needs a tokenizer; this model has none", param="structured_outputs")
        spec = _spec(wanted)
        future = self._futures.get(spec)
        if future is None:
            future = self._futures[spec] = self._pool.submit(self._compile, spec)
            if len(self._futures) > _KEPT_GRAMMARS:
                self._futures.popitem(last=False)
        self._futures.move_to_end(spec)
        return future

    def close(self) -> None:
        """Stop the threads; compilations that have not started are dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, spec: Spec) -> Grammar:
        from deepinfer_structured import StructuredError, compile_spec

        try:
            with self._lock:
                vocabulary = self._vocabulary = self._vocabulary or self._make_vocabulary()
            return compile_spec(spec, vocabulary)
        except (StructuredError, ValueError, RecursionError) as error:
            raise _refusal(error) from error

    def _make_vocabulary(self) -> Vocabulary:
        from deepinfer_structured import Vocabulary

        tokenizer = self._tokenizer
        assert tokenizer is not None
        count = min(tokenizer.max_id + 1, self._vocab_size)
        return Vocabulary(
            [tokenizer.vocabulary[token] for token in range(count)],
            eos_ids=sorted(token for token in tokenizer.eos_ids if token < count),
            special_ids=sorted(token for token in tokenizer.special_ids if token < count),
            size=self._vocab_size,
            encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        )


def _spec(wanted: StructuredOutputs) -> Spec:
    try:
        from deepinfer_structured import Spec, StructuredError
    except ImportError as error:
        message = f"structured output needs the package deepinfer-structured: {error}"
        raise RequestError(message, param="structured_outputs") from error
    try:
        fields = {name: getattr(wanted, name) for name in StructuredOutputs.__slots__}
        if isinstance(wanted.json, bool):  # a schema too, not a field that is switched off
            fields["json"] = json.dumps(wanted.json)
        spec = Spec.from_structured_outputs(fields)
    except StructuredError as error:
        raise _refusal(error) from error
    assert spec is not None
    return spec


def _refusal(error: Exception) -> RequestError:
    return RequestError(f"structured output: {error}", code="invalid_schema", param="response_format")
