"""The `choices` of a response body."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from deepinfer_offline.engine.base import Completion, RequestOutput
from deepinfer_offline.job.logprobs import chat_logprobs, completion_logprobs
from deepinfer_offline.job.pending import Pending
from deepinfer_offline.job.toolcalls import find_calls

Decode = Callable[[Sequence[int]], tuple[str, bytes]]


def write_choices(pending: Pending, output: RequestOutput, decode: Decode) -> list[dict[str, Any]]:
    """Write all n answers of a request.

    Args:
        pending: the request.
        output: its answers.
        decode: text and bytes of token ids, for the first token of an echoed prompt.
    """
    if pending.kind == "chat":
        return [_chat_choice(pending, answer) for answer in output.outputs]
    return [_completion_choice(pending, output, answer, decode) for answer in output.outputs]


def _chat_choice(pending: Pending, answer: Completion) -> dict[str, Any]:
    text, calls = find_calls(answer.text, pending.tool_choice, pending.tool_names)
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    reason = answer.finish_reason
    if calls:
        message["tool_calls"] = [
            {
                "id": f"call_{pending.key}_{answer.index}_{i}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for i, (name, arguments) in enumerate(calls)
        ]
        # OpenAI says `stop` when the caller named the function, `tool_calls` when the model chose to call
        if reason == "stop" and not pending.tool_choice.startswith("function:"):
            reason = "tool_calls"
    return {
        "index": answer.index,
        "message": message,
        "logprobs": chat_logprobs(answer.logprobs) if answer.logprobs is not None else None,
        "finish_reason": reason,
        "stop_reason": answer.stop_reason,
    }


def _completion_choice(pending: Pending, output: RequestOutput, answer: Completion, decode: Decode) -> dict[str, Any]:
    shown = None
    if answer.logprobs is not None:
        before = list(output.prompt_logprobs or ()) if pending.prompt_text is not None else []
        unpredicted = [decode([output.prompt_token_ids[i]]) for i, position in enumerate(before) if position is None]
        shown = completion_logprobs([*before, *answer.logprobs], unpredicted)
    return {
        "index": answer.index,
        "text": (pending.prompt_text or "") + answer.text,
        "logprobs": shown,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
    }
