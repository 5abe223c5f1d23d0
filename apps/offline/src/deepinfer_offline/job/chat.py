"""Bodies of /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from deepinfer_offline.job.checks import boolean, refuse
from deepinfer_offline.job.errors import LineError, show
from deepinfer_offline.job.fields import closest, sampling_fields
from deepinfer_offline.job.form import answer_form
from deepinfer_offline.job.task import Task
from deepinfer_offline.job.tools import read_choice, read_tools
from deepinfer_offline.sampling.params import SamplingParams

ROLES = ("system", "developer", "user", "assistant", "tool")
_KEYS = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "refusal", "reasoning_content", "reasoning"}
)
_TEMPLATE = ("add_generation_prompt", "continue_final_message", "reasoning_effort")


def read(custom_id: str, clean: dict[str, Any]) -> Task:
    """Make a Task of a checked body.

    Raises:
        LineError: no messages, a bad one, or parameters that do not go together.
        RequestError: what SamplingParams refuses.
    """
    if "messages" not in clean:
        raise LineError("messages is missing", code="missing_messages", param="messages")
    messages = [_message(f"messages[{i}]", message) for i, message in enumerate(clean["messages"])]
    tools = read_tools(clean)
    choice = read_choice(clean, tools)
    form = answer_form(clean)
    if form is not None and choice not in ("none", "auto"):
        raise LineError(f"tool_choice {show(choice)} and a form of the answer exclude each other", param="tool_choice")
    fields: dict[str, Any] = {**sampling_fields(clean), "max_tokens": _max_tokens(clean), "logprobs": _logprobs(clean)}
    return Task(
        custom_id=custom_id,
        kind="chat",
        params=SamplingParams(**fields, structured_outputs=form),
        model=clean.get("model"),
        messages=messages,
        template=_template(clean, messages),
        tools=tools if choice != "none" else None,
        tool_choice=choice,
        one_call=clean.get("parallel_tool_calls") is False,
    )


def _message(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise refuse(where, value, "an object with role and content", code="invalid_type")
    for key in value:
        if key not in _KEYS:
            raise LineError(
                f"{where} has an unknown key {show(key)}{closest(key, _KEYS)}",
                code="unknown_parameter",
                param=f"{where}.{key}",
            )
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise refuse(f"{where}.role", role, f"one of {', '.join(ROLES)}", code="invalid_role")
    clean = {key: entry for key, entry in value.items() if entry is not None}
    calls = role == "assistant" and "tool_calls" in clean
    if calls and not isinstance(clean["tool_calls"], list):
        raise refuse(f"{where}.tool_calls", clean["tool_calls"], "a list", code="invalid_type")
    if "content" not in clean and not calls:
        raise LineError(f"{where}.content is missing", code="missing_content", param=f"{where}.content")
    if "content" in clean:
        clean["content"] = _content(f"{where}.content", clean["content"])
    # chat templates know the system role; `developer` is OpenAI's newer name for it
    clean["role"] = "system" if role == "developer" else role
    return clean


def _content(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refuse(where, content, "a string or a list of text parts", code="invalid_type")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else part
        if kind != "text":
            raise refuse(f"{where}[{i}].type", kind, "'text' (this engine reads text only)", code="unsupported_content")
        if not isinstance(part.get("text"), str):
            raise refuse(f"{where}[{i}].text", part.get("text"), "a string", code="invalid_type")
        texts.append(part["text"])
    return "\n".join(texts)


def _max_tokens(clean: dict[str, Any]) -> int | None:
    old, new = clean.get("max_tokens"), clean.get("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise LineError(
            f"max_tokens is {old} and max_completion_tokens is {new}; give one of them", param="max_completion_tokens"
        )
    return old if new is None else new


def _logprobs(clean: dict[str, Any]) -> int | None:
    wanted = boolean("logprobs", clean.get("logprobs", False))
    if "top_logprobs" in clean and not wanted:
        raise LineError(f"top_logprobs is {clean['top_logprobs']}, but logprobs is not true", param="top_logprobs")
    return clean.get("top_logprobs", 0) if wanted else None


def _template(clean: dict[str, Any], messages: list[dict[str, Any]]) -> dict[str, Any]:
    options = {name: clean[name] for name in _TEMPLATE if name in clean}
    for name in clean.get("chat_template_kwargs", {}):
        if name in ("self", "messages", "tools", *_TEMPLATE) or not name.isidentifier():
            raise LineError(f"chat_template_kwargs may not set {show(name)}", param=f"chat_template_kwargs.{name}")
    options.update(clean.get("chat_template_kwargs", {}))
    if options.get("continue_final_message"):
        if options.get("add_generation_prompt"):
            raise LineError(
                "continue_final_message and add_generation_prompt cannot both be true", param="continue_final_message"
            )
        if messages[-1]["role"] != "assistant":
            raise LineError(
                f"continue_final_message is true, but the last message is of role {show(messages[-1]['role'])}",
                param="continue_final_message",
            )
    return options
