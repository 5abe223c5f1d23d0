"""What a request asks of the sampler: vLLM's names, defaults and meanings, checked when the object is made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepinfer_offline.engine.base import RequestError

GREEDY_BELOW = 1e-5  # temperatures below it mean greedy, as in vLLM
MAX_N = 16384
MAX_SEED = 2**64 - 1


def _refuse(name: str, value: Any, allowed: str) -> RequestError:
    return RequestError(f"{name} must be {allowed}, got {value!r}", code="invalid_value", param=name)


_STOP = "a non-empty string or a list of non-empty strings"
FORMS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """What the answer must look like. Exactly one field is set.

    Attributes:
        json: a JSON schema, as a dict, a bool or JSON text.
        regex: a regular expression that the whole answer matches.
        choice: the answer is one of these strings.
        grammar: an EBNF or Lark grammar.
        json_object: True: any JSON object.
        structural_tag: a structural tag specification, as a dict or JSON text.
        origin: the parameter that asked for it, for messages.
    """

    json: Mapping[str, Any] | str | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Mapping[str, Any] | str | None = None
    origin: str = field(default="structured_outputs", compare=False)

    def __post_init__(self) -> None:
        given = [name for name in FORMS if getattr(self, name) is not None]
        if len(given) != 1:
            raise _refuse("structured_outputs", given, f"an object with exactly one of {', '.join(FORMS)}")
        if self.choice is not None and (not self.choice or not all(isinstance(c, str) for c in self.choice)):
            raise _refuse("structured_outputs.choice", self.choice, "a non-empty list of strings")
        if self.json_object is False:
            raise _refuse("structured_outputs.json_object", False, "true")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample the answers of one request. Field names and defaults are vLLM's.

    Attributes:
        n: number of answers, 1..16384. Answer i draws from a stream derived from (seed, i).
        temperature: >= 0; below 1e-5 is greedy.
        top_p: keep the smallest set of likeliest tokens whose probability reaches it, 0 < top_p <= 1.
        top_k: keep the k likeliest tokens; 0 or -1 keeps all.
        min_p: drop tokens below min_p times the likeliest token's probability, 0..1.
        presence_penalty: subtracted from the logits of tokens already generated, -2..2.
        frequency_penalty: the same, times how often each was generated, -2..2.
        repetition_penalty: > 0; divides positive and multiplies negative logits of tokens in prompt or answer.
        seed: stream of random numbers. The same seed, prompt and model give the same answer in any batch.
            None: derived from the engine's seed and the request id.
        stop: strings that end the answer; they are not part of it (but see `include_stop_str_in_output`).
        stop_token_ids: token ids that end the answer. The id is kept in `token_ids`, its text is not in `text`.
        ignore_eos: generate past the end-of-sequence token.
        max_tokens: most tokens to generate; None: up to the model's context.
        min_tokens: end-of-sequence and stop ids are not drawn, and stop strings not looked for, before so many tokens.
        logprobs: how many likeliest tokens to report at every position (0: the drawn one only, -1: all, None: off).
            They describe the model's own distribution: before temperature, penalties, bias and grammar.
        prompt_logprobs: the same for the prompt's tokens.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: accepted for compatibility; fast tokenizers add no such spaces.
        include_stop_str_in_output: keep the stop string at the end of the text.
        logit_bias: token id -> number added to its logit, -100..100.
        structured_outputs: a form that the answer must have.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: Mapping[int, float] | None = None
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        self._normalise()
        self._check_ranges()
        self._check_lengths()
        self._check_stops()
        self._check_bias()

    @property
    def greedy(self) -> bool:
        """Whether every token is the likeliest one."""
        return self.temperature < GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        """Whether logits depend on the tokens before."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    def _normalise(self) -> None:
        stop = self.stop
        object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else _listed("stop", stop, _STOP))
        object.__setattr__(
            self, "stop_token_ids", _listed("stop_token_ids", self.stop_token_ids, "a list of token ids")
        )
        if isinstance(self.structured_outputs, Mapping):
            try:
                object.__setattr__(self, "structured_outputs", StructuredOutputs(**self.structured_outputs))
            except TypeError as error:
                allowed = f"an object with one of {', '.join(FORMS)}"
                raise _refuse("structured_outputs", self.structured_outputs, allowed) from error

    def _check_ranges(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        _number("temperature", self.temperature, 0, math.inf)
        _number("top_p", self.top_p, 0, 1, open_low=True)
        _integer("top_k", self.top_k, -1, None)
        _number("min_p", self.min_p, 0, 1)
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        _number("repetition_penalty", self.repetition_penalty, 0, math.inf, open_low=True)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), MAX_SEED)

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, None)
        _integer("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _refuse("min_tokens", self.min_tokens, f"at most max_tokens, {self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), -1, None)

    def _check_stops(self) -> None:
        for text in self.stop or ():
            if not isinstance(text, str) or not text:
                raise _refuse("stop", text, _STOP)
        for token in self.stop_token_ids or ():
            _integer("stop_token_ids", token, 0, None)

    def _check_bias(self) -> None:
        if not self.logit_bias:
            object.__setattr__(self, "logit_bias", None)
            return
        if not isinstance(self.logit_bias, Mapping):
            raise _refuse("logit_bias", self.logit_bias, "an object of token id: bias")
        clean: dict[int, float] = {}
        for key, bias in self.logit_bias.items():
            try:
                token = int(str(key))
            except (TypeError, ValueError):
                raise _refuse("logit_bias", key, "an object whose keys are token ids") from None
            _integer("logit_bias", token, 0, None)
            _number("logit_bias", bias, -100, 100)
            clean[token] = float(bias)
        object.__setattr__(self, "logit_bias", clean)


def _listed(name: str, value: Any, allowed: str) -> tuple[Any, ...]:
    try:
        return () if value is None else tuple(value)
    except TypeError:
        raise _refuse(name, value, allowed) from None


def _integer(name: str, value: Any, low: int, high: int | None) -> None:
    allowed = f"an integer from {low} to {high}" if high is not None else f"an integer of at least {low}"
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        raise _refuse(name, value, allowed)


def _number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if good and low <= value <= high and not (open_low and value == low):
        return
    above = f"greater than {low}" if open_low else f"at least {low}"
    raise _refuse(name, value, f"a number {above}" + ("" if high == math.inf else f" and at most {high}"))
