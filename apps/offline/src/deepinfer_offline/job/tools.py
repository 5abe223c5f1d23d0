"""Tool definitions and tool choice of a chat body."""

from __future__ import annotations

import re
from typing import Any

from deepinfer_offline.job.checks import mapping, refuse
from deepinfer_offline.job.errors import LineError, show

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
CHOICES = ("none", "auto", "required")


def read_tools(clean: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Check the shape of `tools`. Raises LineError naming the entry that is wrong."""
    if "tools" not in clean:
        return None
    seen: set[str] = set()
    for i, tool in enumerate(clean["tools"]):
        where = f"tools[{i}]"
        if mapping(where, tool).get("type") != "function":
            raise refuse(f"{where}.type", tool.get("type"), "'function'")
        function = mapping(f"{where}.function", tool.get("function"))
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise refuse(f"{where}.function.name", name, "1 to 64 letters, digits, _ or -")
        if name in seen:
            raise LineError(f"{where}.function.name {show(name)} appears twice", param=f"{where}.function.name")
        seen.add(name)
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise refuse(f"{where}.function.parameters", parameters, "a JSON schema (an object)", code="invalid_type")
    return clean["tools"]


def read_choice(clean: dict[str, Any], tools: list[dict[str, Any]] | None) -> str:
    """Check `tool_choice`.

    Returns:
        `none`, `auto`, `required`, or `function:` and the name of the one tool to call.

    Raises:
        LineError: an unknown choice, or one without the tool that it needs.
    """
    choice = clean.get("tool_choice", "auto" if tools else "none")
    if choice in CHOICES if isinstance(choice, str) else False:
        if choice != "none" and not tools:
            raise LineError(f"tool_choice is {show(choice)}, but tools is missing", param="tool_choice")
        return choice
    if not isinstance(choice, dict) or choice.get("type") != "function" or not isinstance(choice.get("function"), dict):
        raise refuse("tool_choice", choice, "none, auto, required or an object that names a function")
    name = choice["function"].get("name")
    names = [tool["function"]["name"] for tool in tools or ()]
    if name not in names:
        raise refuse("tool_choice.function.name", name, f"the name of a tool ({', '.join(names) or 'there are none'})")
    return f"function:{name}"
