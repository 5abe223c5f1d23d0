"""DeepInfer's requests and outputs as vLLM's, and back. Pure functions; vLLM's classes are handed in or duck-typed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from deepinfer_offline.engine.base import Completion, PositionLogprobs, RequestOutput, TokenLogprob
from deepinfer_offline.sampling.params import FORMS, SamplingParams, StructuredOutputs

# Fields that both classes spell and mean alike.
_SHARED = (
    "n", "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
    "ignore_eos", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "skip_special_tokens",
    "spaces_between_special_tokens", "include_stop_str_in_output",
)  # fmt: skip


def sampling_arguments(params: SamplingParams, max_tokens: int) -> dict[str, Any]:
    """Return keyword arguments for `vllm.SamplingParams`.

    Args:
        params: what the request asks.
        max_tokens: the room left in the context, used where the request sets no limit of its own.
    """
    arguments = {name: getattr(params, name) for name in _SHARED}
    arguments["max_tokens"] = max_tokens if params.max_tokens is None else min(params.max_tokens, max_tokens)
    if params.greedy:  # n equal answers: vLLM refuses to compute them, `request_output` repeats the one
        arguments["n"] = 1
    arguments["top_k"] = max(params.top_k, 0)
    arguments["stop"] = list(params.stop or ())
    arguments["stop_token_ids"] = list(params.stop_token_ids or ())
    arguments["logit_bias"] = dict(params.logit_bias) if params.logit_bias else None
    if params.structured_outputs is not None:
        arguments["structured_outputs"] = structured_arguments(params.structured_outputs)
    return arguments


def structured_arguments(wanted: StructuredOutputs) -> dict[str, Any]:
    """Return keyword arguments for `vllm.sampling_params.StructuredOutputsParams`: the one field that is set."""
    return {name: value for name in FORMS if (value := getattr(wanted, name)) is not None}


def _token(token_id: int, value: Any) -> TokenLogprob:
    """Translate a `vllm.logprobs.Logprob`. It carries text, not bytes: a split character is U+FFFD in both."""
    text = value.decoded_token or ""
    return TokenLogprob(token_id, value.logprob, value.rank or 0, text, text.encode())


def position(entry: Mapping[int, Any] | None, token_id: int | None, top: int) -> PositionLogprobs | None:
    """Translate one position of vLLM's logprobs, a map of token id to Logprob; `top` is how many were asked for."""
    if not entry:
        return None
    tokens = {id_: _token(id_, value) for id_, value in entry.items()}
    chosen = tokens[token_id if token_id in tokens else next(iter(tokens))]
    ranked = sorted(tokens.values(), key=lambda t: (t.rank, t.token_id))
    return PositionLogprobs(chosen, tuple(ranked if top < 0 else ranked[:top]))


def completion(output: Any, params: SamplingParams) -> Completion:
    """Translate a `vllm.CompletionOutput`."""
    ids = list(output.token_ids)
    logprobs = None
    if params.logprobs is not None and output.logprobs is not None:
        found = [position(e, i, params.logprobs) for e, i in zip(output.logprobs, ids, strict=False)]
        logprobs = [entry for entry in found if entry is not None]
    reason = output.finish_reason if output.finish_reason in ("stop", "length", "abort") else "error"
    return Completion(output.index, output.text, ids, reason, output.stop_reason, logprobs, output.cumulative_logprob)


def request_output(output: Any, request_id: str, prompt: Sequence[int], params: SamplingParams) -> RequestOutput:
    """Translate a finished `vllm.RequestOutput`."""
    prompt_logprobs = None
    if params.prompt_logprobs is not None and output.prompt_logprobs is not None:
        prompt_logprobs = [
            position(entry, token_id, params.prompt_logprobs)
            for entry, token_id in zip(output.prompt_logprobs, prompt, strict=False)
        ]
    completions = sorted((completion(c, params) for c in output.outputs), key=lambda c: c.index)
    if params.greedy:
        completions = [replace(completions[0], index=i) for i in range(params.n)]
    return RequestOutput(
        request_id,
        prompt,
        completions,
        num_cached_tokens=max(output.num_cached_tokens or 0, 0),
        prompt_logprobs=prompt_logprobs,
    )
