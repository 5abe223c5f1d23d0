"""One input line, judged: a Task, or the LineError that says what is wrong with it."""

from __future__ import annotations

from typing import Any

from deepinfer_offline.engine.base import RequestError
from deepinfer_offline.job import chat, completion
from deepinfer_offline.job.codec import decode_line, find_first_string, find_string
from deepinfer_offline.job.errors import LineError, show
from deepinfer_offline.job.fields import PARAMETERS, Kind, check_parameters, closest
from deepinfer_offline.job.lines import Line
from deepinfer_offline.job.task import Task

ENDPOINTS: dict[str, Kind] = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}
_KEYS = ("custom_id", "method", "url", "body")
MAX_ID = 512  # characters


def read_object(line: Line) -> dict[str, Any]:
    """The JSON object on a line. Raises LineError, under the line's `custom_id` if that is plain, when there is none."""
    if line.fault is not None:
        error = LineError(line.fault, code="invalid_line")
        error.custom_id, error.owns_id = line.custom_id, False
        raise error
    try:
        value = decode_line(line.raw)
    except LineError as error:
        error.custom_id = find_string(line.raw, "custom_id")
        if error.custom_id is None:
            error.custom_id, error.owns_id = find_first_string(line.raw, "custom_id"), False
        raise
    if not isinstance(value, dict):
        raise LineError(f"the line must be a JSON object, got {show(value)}", code="invalid_type")
    return value


def name_of(value: dict[str, Any]) -> str | None:
    """The `custom_id` to answer under: what the line has if that is a string, right or wrong otherwise."""
    name = value.get("custom_id")
    return name if isinstance(name, str) else None


def parse_request(value: dict[str, Any]) -> Task:
    """Read a batch line.

    Args:
        value: the line's JSON object.

    Returns:
        What it asks for.

    Raises:
        LineError: the first thing that is wrong with it.
    """
    custom_id = _custom_id(value)
    for key in value:
        if key not in _KEYS:
            hint = " (it belongs inside body)" if key in PARAMETERS else closest(key, _KEYS)
            raise LineError(
                f"unknown key {show(key)}; a line has custom_id, method, url and body{hint}",
                code="unknown_parameter",
                param=key,
            )
    if value.get("method") != "POST":
        raise _wrong(value, "method", "'POST'")
    url = value.get("url")
    if not isinstance(url, str) or url not in ENDPOINTS:
        raise _wrong(value, "url", " or ".join(ENDPOINTS), code="invalid_url")
    body = value.get("body")
    if not isinstance(body, dict):
        raise _wrong(value, "body", "an object")
    kind = ENDPOINTS[url]
    clean = check_parameters(body, kind)
    try:
        return chat.read(custom_id, clean) if kind == "chat" else completion.read(custom_id, clean)
    except RequestError as error:
        raise LineError(str(error), code=error.code, param=error.param) from error


def _custom_id(value: dict[str, Any]) -> str:
    if "custom_id" not in value:
        raise LineError("custom_id is missing", code="missing_custom_id", param="custom_id")
    name = value["custom_id"]
    if not isinstance(name, str):
        raise LineError(f"custom_id must be a string, got {show(name)}", code="invalid_custom_id", param="custom_id")
    if not name.strip():
        raise LineError(f"custom_id is empty: {show(name)}", code="invalid_custom_id", param="custom_id")
    if len(name) > MAX_ID:
        raise LineError(
            f"custom_id has {len(name)} characters; at most {MAX_ID} are allowed",
            code="invalid_custom_id",
            param="custom_id",
        )
    return name


def _wrong(value: dict[str, Any], key: str, allowed: str, code: str = "invalid_value") -> LineError:
    if key not in value:
        return LineError(f"{key} is missing; it must be {allowed}", code=f"missing_{key}", param=key)
    return LineError(f"{key} must be {allowed}, got {show(value[key])}", code=code, param=key)
