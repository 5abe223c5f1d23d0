"""Tool calls: how a required call constrains the answer, and how calls are found in an answer."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from deepinfer_offline.job.codec import dumps, loads
from deepinfer_offline.job.task import Task
from deepinfer_offline.sampling.params import StructuredOutputs

_TOOLS = "tools"
_PLACE = re.compile(r"schema at (/\S*):")
_CALL_PLACE = re.compile(r"schema at /items/anyOf/(\d+)/properties/arguments(\S*):")
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
Call = tuple[str, str]  # name, arguments as JSON text


def tool_form(task: Task) -> StructuredOutputs | None:
    """The form that a required tool call puts on the answer; None if calling is up to the model.

    One named tool: its arguments. `required`: a list of `{"name", "arguments"}`.
    """
    if task.tool_choice in ("none", "auto") or not task.tools:
        return None
    functions = {tool["function"]["name"]: tool["function"] for tool in task.tools}
    if task.tool_choice != "required":
        return StructuredOutputs(json=_arguments(functions[task.tool_choice.removeprefix("function:")]), origin=_TOOLS)
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": _arguments(function)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name, function in functions.items()
    ]
    shape: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    return StructuredOutputs(json={**shape, "maxItems": 1} if task.one_call else shape, origin=_TOOLS)


def at_tool(message: str, choice: str, names: Sequence[str]) -> str:
    """A message about the form that a required tool call makes, with its place in `tools`."""
    if choice != "required":
        name = choice.removeprefix("function:")
        return (
            _PLACE.sub(rf"tools[{names.index(name)}].function.parameters at \1:", message) if name in names else message
        )
    return _CALL_PLACE.sub(lambda m: f"tools[{m[1]}].function.parameters at {m[2] or '/'}:", message)


def find_calls(text: str, choice: str, names: Collection[str]) -> tuple[str | None, list[Call]]:
    """Find the tool calls in an answer.

    Args:
        text: the answer.
        choice: see `Task.tool_choice`.
        names: the tools that the model was shown.

    Returns:
        The answer's text without the calls (None if nothing else is there), and the calls. An answer that is no
        complete, well-formed call of a known tool is text.
    """
    if choice == "none" or not names:
        return text, []
    try:
        if choice.startswith("function:"):
            loads(text.encode())
            return None, [(choice.removeprefix("function:"), text)]
        if choice == "required":
            return None, [_call(value, names) for value in loads(text.encode())]
        calls = [_call(loads(match.encode()), names) for match in _CALL.findall(text)]
    except (ValueError, TypeError, KeyError, AttributeError):
        return text, []
    return (_CALL.sub("", text).strip() or None if calls else text), calls


def _call(value: dict[str, Any], names: Collection[str]) -> Call:
    name, arguments = value["name"], value.get("arguments", {})
    if name not in names or not isinstance(arguments, dict):
        raise ValueError(name)
    return name, dumps(arguments).decode()


def _arguments(function: dict[str, Any]) -> dict[str, Any]:
    return function.get("parameters") or {"type": "object"}
