"""Structured output for the engines: from what a request says to a compiled grammar, off the engine's thread."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import Counter, OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, cast

from deepinfer_offline.engine.base import RequestError
from deepinfer_offline.sampling.params import FORMS, StructuredOutputs

if TYPE_CHECKING:
    from deepinfer_structured import Grammar, Options, Spec, Vocabulary
    from deepinfer_structured.config import OnUnsupported

    from deepinfer_offline.text.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)
_KEPT_GRAMMARS = 512
_MOST_NOTES = 100


def grammar_folder() -> Path:
    """Where analysed schemas are kept between runs: `grammars` in `$DEEPINFER_CACHE_DIR`, by default in
    `$XDG_CACHE_HOME/deepinfer` or `~/.cache/deepinfer`."""
    own = os.environ.get("DEEPINFER_CACHE_DIR")
    base = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "deepinfer"
    return base.expanduser() / "grammars"


class GrammarCompiler:
    """Compiles structured outputs on threads of its own and keeps the results, so equal schemas compile once.

    Args:
        tokenizer: the model's tokenizer.
        vocab_size: width of the logits.
        threads: compilations at a time.
        options: how schemas become grammars; None for the defaults, with analysed schemas kept in `grammar_folder`.
        on_unsupported: with the default options, what becomes of keywords that no grammar can enforce (`EngineOptions`).

    Attributes:
        notes: what grammars have to say (a keyword that is left out under `on_unsupported="warn"`, a `format` that is an
            annotation), and how many grammars say it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        *,
        threads: int = 1,
        options: Options | None = None,
        on_unsupported: str = "error",
    ) -> None:
        self._tokenizer, self._vocab_size, self._options = tokenizer, vocab_size, options
        self._on_unsupported = on_unsupported
        self.notes: Counter[str] = Counter()
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
        from deepinfer_structured import Options, StructuredError, compile_spec

        try:
            with self._lock:
                vocabulary = self._vocabulary = self._vocabulary or self._make_vocabulary()
            unsupported = cast("OnUnsupported", self._on_unsupported)
            options = self._options or Options(cache_dir=str(grammar_folder()), on_unsupported=unsupported)
            grammar = compile_spec(spec, vocabulary, options)
            self._take_notes(grammar.notes)
            return grammar
        except (StructuredError, ValueError, RecursionError) as error:
            raise _refusal(error) from error

    def _take_notes(self, notes: tuple[str, ...]) -> None:
        with self._lock:
            for note in notes:
                if note not in self.notes:
                    if len(self.notes) >= _MOST_NOTES:
                        return
                    _LOG.warning("structured output: %s", note)
                self.notes[note] += 1

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
        fields = {name: getattr(wanted, name) for name in FORMS}
        if isinstance(wanted.json, bool):  # a schema too, not a field that is switched off
            fields["json"] = json.dumps(wanted.json)
        spec = Spec.from_structured_outputs(fields)
    except StructuredError as error:
        raise _refusal(error) from error
    assert spec is not None
    return spec


def _refusal(error: Exception) -> RequestError:
    return RequestError(f"structured output: {error}", code="invalid_schema", param="structured_outputs")
