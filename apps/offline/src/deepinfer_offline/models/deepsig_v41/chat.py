"""The V4.1 message encoding: system, tools, thinking and reasoning effort, through the `deepseek-recipe` package.

A drop-in for `deepinfer_offline.text.chat.ChatTemplate`: the checkpoint has no Jinja template of its own. A tokenizer that does
carry one keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from deepinfer_offline.engine.base import RequestError

INSTALL = "pip install deepseek-recipe"
_MODEL = "DeepSeek-V4.1-Flash"  # the name by which the package selects the V4.1 encoding
_OPTIONS = ("reasoning_effort", "thinking", "enable_thinking", "tool_choice", "response_format")


class V41ChatEncoding:
    """Renders conversations to prompt text with V4.1's special tokens.

    Raises:
        RequestError: `deepseek-recipe` is not installed; the message says how to get it.
    """

    source = "deepseek-recipe"

    def __init__(self) -> None:
        try:
            self._recipe: Any = import_module("deepseek_recipe")
        except ImportError as error:
            raise RequestError(
                "this model's chat messages are encoded by the deepseek-recipe package, which is not installed "
                f"({INSTALL}), and its tokenizer has no chat template. Send a plain prompt instead.",
                code="no_chat_template",
                param="messages",
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation.

        Args:
            messages: OpenAI chat messages. A last assistant message is continued when `add_generation_prompt` is False.
            tools: OpenAI tool definitions.
            add_generation_prompt: end with the start of an answer.
            variables: `reasoning_effort` (low, high, xhigh, max), `thinking` or `enable_thinking` (bool), `tool_choice`,
                `response_format`.

        Raises:
            RequestError: images, an unknown role or option, or what the encoding itself refuses.
        """
        body = self._body([dict(message) for message in messages], tools, add_generation_prompt, variables)
        try:
            request = self._recipe.ChatCompletionRequest(body)
            converted = request.convert(self._recipe.ConversionOptions())
            return self._recipe.DeepseekV41Encoding().render_conversation(converted.conversation).prompt
        except (self._recipe.ConversionError, ValueError, TypeError) as error:
            detail = getattr(error, "body", None) or str(error)
            raise RequestError(
                f"the V4.1 encoding refuses these messages: {detail}", code="chat_template_error", param="messages"
            ) from error

    def _body(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> dict[str, Any]:
        unknown = sorted(set(variables) - set(_OPTIONS))
        if unknown:
            raise RequestError(
                f"the V4.1 encoding has no option {', '.join(unknown)}; it has {', '.join(_OPTIONS)}",
                param="chat_template_kwargs",
            )
        _refuse_images(messages)
        if not add_generation_prompt:
            _mark_prefix(messages)
        body: dict[str, Any] = {"model": _MODEL, "messages": messages}
        if tools:
            body["tools"] = [dict(tool) for tool in tools]
        thinking = variables.get("thinking", variables.get("enable_thinking"))
        if thinking is not None:
            kind = "enabled" if thinking else "disabled"
            body["thinking"] = thinking if isinstance(thinking, Mapping) else {"type": kind}
        for name in ("reasoning_effort", "tool_choice", "response_format"):
            if variables.get(name) is not None:
                body[name] = variables[name]
        return body


def _refuse_images(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise RequestError for the first content part that is not text."""
    for place, message in enumerate(messages):
        parts = message.get("content")
        for part in parts if isinstance(parts, list) else ():
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind != "text":
                raise RequestError(
                    f"message {place} has a content part of type {kind!r}: this engine reads text only, no images",
                    code="unsupported_content",
                    param="messages",
                )


def _mark_prefix(messages: list[dict[str, Any]]) -> None:
    """Let the last assistant message be continued instead of answered."""
    if not messages or messages[-1].get("role") != "assistant":
        raise RequestError(
            "add_generation_prompt=False continues the last message, which must then be the assistant's",
            param="messages",
        )
    messages[-1]["prefix"] = True
