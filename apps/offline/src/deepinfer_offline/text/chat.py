"""Chat templates: a conversation becomes the text that the model was trained to see."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from deepinfer_offline.engine.base import EngineStartError, RequestError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class ChatTemplate:
    """A Jinja chat template, rendered in a sandbox the way Hugging Face tokenizers do.

    Args:
        source: template text.
        variables: what every rendering sees, e.g. `bos_token`, `eos_token`.

    Raises:
        EngineStartError: the template is not valid Jinja.
    """

    def __init__(self, source: str, **variables: Any) -> None:
        self.source = source
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise EngineStartError(f"the model's chat template is not valid Jinja: {error}") from error
        self._variables = {name: value for name, value in variables.items() if value is not None}

    @staticmethod
    def missing(name: str) -> RequestError:
        """The error for a conversation sent to a model without a template."""
        return RequestError(
            f"{name} has no chat template, so it cannot answer chat messages. Send a plain prompt to /v1/completions "
            "(LLM.generate), or add a chat_template.jinja to the model's folder.",
            code="no_chat_template",
            param="messages",
        )

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
            messages: OpenAI chat messages; content is a string or a list of text parts.
            tools: tool definitions for templates that know them.
            add_generation_prompt: end with the start of an answer. False with a last assistant message continues it
                only if the template leaves it open.
            variables: further names that the template may read (`chat_template_kwargs`).

        Raises:
            RequestError: a malformed message, an unknown role, or the template's own refusal.
        """
        known = {**self._variables, **variables}
        try:
            return self._template.render(
                messages=check_messages(messages),
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
                **known,
            )
        except jinja2.TemplateError as error:
            raise RequestError(
                f"the chat template refuses these messages: {error}", code="chat_template_error", param="messages"
            ) from error
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            if isinstance(error, RequestError):
                raise
            raise RequestError(
                f"the chat template fails on these messages: {error}", code="chat_template_error", param="messages"
            ) from error


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with text parts joined.

    Raises:
        RequestError: naming the message and what is wrong with it.
    """
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("messages must be a non-empty list of {role, content} objects", param="messages")
    return [_check_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _check_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object with role and content, got {message!r}", param="messages")
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(f"{where}.role must be one of {', '.join(ROLES)}, got {role!r}", param=f"{where}.role")
    content = message.get("content")
    if content is None and not message.get("tool_calls") and not message.get("function_call"):
        raise RequestError(f"{where}.content is missing", param=f"{where}.content")
    return {**message, "content": _text(content, f"{where}.content")}


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError(f"{where} must be a string or a list of text parts, got {content!r}", param=where)
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise RequestError(f"{where} has a part of type {kind!r}; this model reads text parts only", param=where)
    return "\n".join(texts)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    helpers: dict[str, Any] = environment.globals
    helpers["raise_exception"] = _refuse
    helpers["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes HTML characters, which would change what the model reads.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
