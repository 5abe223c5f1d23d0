"""The parameters that a request body may have: which endpoint takes them, what they may be, where they go."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from deepinfer_offline.job import checks
from deepinfer_offline.job.checks import Check
from deepinfer_offline.job.errors import LineError, show

Kind = Literal["chat", "completion"]
BOTH, CHAT, COMPLETION = ("chat", "completion"), ("chat",), ("completion",)
MAX_N = 128
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter.

    Attributes:
        kinds: the endpoints that take it.
        check: refuses wrong values, returns the cleaned one.
        use: `sampling` goes into SamplingParams under its own name, `request` is read by this package, `ignored` has no
            meaning in a batch run and is accepted so that files made for other services run unchanged.
    """

    kinds: tuple[str, ...]
    check: Check
    use: Literal["sampling", "request", "ignored"] = "sampling"


def _only(*allowed: Any) -> Check:
    words = " or ".join(show(value) for value in allowed)

    def check(where: str, value: Any) -> Any:
        if not any(value == entry and type(value) is type(entry) for entry in allowed):
            raise checks.refuse(where, value, words, code="unsupported_value")
        return value

    return check


def _no_stream(where: str, value: Any) -> bool:
    if checks.boolean(where, value):
        raise LineError(
            "stream is true, but a batch answers each line at once; remove it", code="unsupported_value", param=where
        )
    return value


def _anything(where: str, value: Any) -> Any:
    del where
    return value


PARAMETERS: dict[str, Parameter] = {
    "model": Parameter(BOTH, checks.string, "request"),
    # how to sample: vLLM's names, OpenAI's ranges
    "temperature": Parameter(BOTH, checks.number(0, 2)),
    "top_p": Parameter(BOTH, checks.number(0, 1, above=True)),
    "top_k": Parameter(BOTH, checks.integer(-1, 1 << 31)),
    "min_p": Parameter(BOTH, checks.number(0, 1)),
    "presence_penalty": Parameter(BOTH, checks.number(-2, 2)),
    "frequency_penalty": Parameter(BOTH, checks.number(-2, 2)),
    "repetition_penalty": Parameter(BOTH, checks.number(0, 100, above=True)),
    "seed": Parameter(BOTH, checks.integer(-(1 << 63), (1 << 64) - 1)),
    "n": Parameter(BOTH, checks.integer(1, MAX_N)),
    "logit_bias": Parameter(BOTH, checks.bias),
    # when to stop
    "max_tokens": Parameter(BOTH, checks.integer(1)),
    "max_completion_tokens": Parameter(CHAT, checks.integer(1), "request"),
    "min_tokens": Parameter(BOTH, checks.integer(0)),
    "stop": Parameter(BOTH, checks.stops),
    "stop_token_ids": Parameter(BOTH, checks.integers(0, 1 << 31)),
    "ignore_eos": Parameter(BOTH, checks.boolean),
    # what to show
    "include_stop_str_in_output": Parameter(BOTH, checks.boolean),
    "skip_special_tokens": Parameter(BOTH, checks.boolean),
    "spaces_between_special_tokens": Parameter(BOTH, checks.boolean),
    "logprobs": Parameter(BOTH, _anything, "request"),
    "top_logprobs": Parameter(CHAT, checks.integer(0, MAX_LOGPROBS), "request"),
    "echo": Parameter(COMPLETION, checks.boolean, "request"),
    # the prompt
    "messages": Parameter(CHAT, checks.sequence, "request"),
    "prompt": Parameter(COMPLETION, _anything, "request"),
    "add_special_tokens": Parameter(COMPLETION, checks.boolean, "request"),
    "add_generation_prompt": Parameter(CHAT, checks.boolean, "request"),
    "continue_final_message": Parameter(CHAT, checks.boolean, "request"),
    "chat_template_kwargs": Parameter(CHAT, checks.mapping, "request"),
    "reasoning_effort": Parameter(CHAT, checks.string, "request"),
    # the form of the answer
    "response_format": Parameter(BOTH, checks.mapping, "request"),
    "structured_outputs": Parameter(BOTH, checks.mapping, "request"),
    "tools": Parameter(CHAT, checks.sequence, "request"),
    "tool_choice": Parameter(CHAT, _anything, "request"),
    "parallel_tool_calls": Parameter(CHAT, checks.boolean, "request"),
    # of no meaning here, or with one possible value
    "stream": Parameter(BOTH, _no_stream, "ignored"),
    "best_of": Parameter(COMPLETION, _only(1), "ignored"),
    "suffix": Parameter(COMPLETION, _only(""), "ignored"),
    "modalities": Parameter(CHAT, _only(["text"]), "ignored"),
    "user": Parameter(BOTH, _anything, "ignored"),
    "metadata": Parameter(BOTH, _anything, "ignored"),
    "store": Parameter(BOTH, _anything, "ignored"),
    "service_tier": Parameter(BOTH, _anything, "ignored"),
    "safety_identifier": Parameter(BOTH, _anything, "ignored"),
    "prompt_cache_key": Parameter(BOTH, _anything, "ignored"),
}


ELSEWHERE: dict[str, str] = {
    "bad_words": "give a word that is one token a logit_bias of -100, or say what the answer may be by structured_outputs",
    "guided_json": "write structured_outputs.json",
    "guided_regex": "write structured_outputs.regex",
    "guided_choice": "write structured_outputs.choice",
    "guided_grammar": "write structured_outputs.grammar",
    "functions": "write tools",
    "function_call": "write tool_choice",
    "prompt_logprobs": "write echo with logprobs, on /v1/completions",
    "use_beam_search": "answers are drawn, not searched for; n gives several",
    "extra_body": "it is a client's argument; put what it holds into body itself",
}
"""Parameters that other services take, and what to write here instead."""


def check_parameters(body: dict[str, Any], kind: Kind) -> dict[str, Any]:
    """Check every parameter of a body on its own.

    Args:
        body: the body as it was read. A null stands for an absent parameter.
        kind: the endpoint.

    Returns:
        The cleaned parameters that are there.

    Raises:
        LineError: a parameter is unknown, is of the other endpoint, or has a value that it may not have.
    """
    clean = {}
    for name, value in body.items():
        parameter = PARAMETERS.get(name)
        if parameter is None or kind not in parameter.kinds:
            raise _unknown(name, kind)
        if value is not None:
            clean[name] = parameter.check(name, value)
    return clean


def sampling_fields(clean: dict[str, Any]) -> dict[str, Any]:
    """The cleaned parameters that SamplingParams takes under the same name."""
    return {name: value for name, value in clean.items() if PARAMETERS[name].use == "sampling"}


def closest(name: str, known: Iterable[str]) -> str:
    """Words that suggest what `name` was meant to be, or nothing."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.75)
    return f"; did you mean {found[0]!r}?" if found else ""


def _unknown(name: str, kind: Kind) -> LineError:
    if name in PARAMETERS:
        other = "/v1/completions" if kind == "chat" else "/v1/chat/completions"
        message = f"parameter {show(name)} belongs to {other}"
    elif name in ELSEWHERE:
        message = f"parameter {show(name)} is not supported: {ELSEWHERE[name]}"
    else:
        message = f"unknown parameter {show(name)}" + closest(
            name, (n for n in PARAMETERS if kind in PARAMETERS[n].kinds)
        )
    return LineError(message, code="unknown_parameter", param=name)
