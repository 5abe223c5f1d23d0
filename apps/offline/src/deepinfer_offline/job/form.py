"""The form that an answer must have: `response_format` (OpenAI) and `structured_outputs` (vLLM) as one thing."""

from __future__ import annotations

from typing import Any

from deepinfer_offline.job.checks import boolean, mapping, refuse, string
from deepinfer_offline.job.errors import LineError, show
from deepinfer_offline.sampling.params import FORMS, StructuredOutputs

_FORMAT = "response_format"
_KINDS = ("text", "json_object", "json_schema", "structural_tag")
_SCHEMA_KEYS = frozenset({"name", "description", "schema", "strict"})


def answer_form(clean: dict[str, Any]) -> StructuredOutputs | None:
    """Read what a body says about the form of its answer. Whether the form can be enforced is judged later.

    Args:
        clean: the checked body.

    Returns:
        None for free text.

    Raises:
        LineError: the parameter has the wrong shape, or both are there.
        RequestError: what StructuredOutputs refuses.
    """
    form = _response_format(clean["response_format"]) if "response_format" in clean else None
    if "structured_outputs" not in clean:
        return form
    if form is not None:
        raise LineError(
            "response_format and structured_outputs cannot both constrain the answer", param="structured_outputs"
        )
    return _structured_outputs(clean["structured_outputs"])


def _response_format(value: dict[str, Any]) -> StructuredOutputs | None:
    kind = value.get("type")
    if kind not in _KINDS:
        raise refuse("response_format.type", kind, f"one of {', '.join(_KINDS)}")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json_object=True, origin=_FORMAT)
    if kind == "structural_tag":
        tag = {name: part for name, part in value.items() if name != "type"}
        return StructuredOutputs(structural_tag=tag, origin=_FORMAT)
    _check_schema("response_format.json_schema", value.get("json_schema"))
    return StructuredOutputs(json=value["json_schema"]["schema"], origin=_FORMAT)


def _check_schema(where: str, value: Any) -> None:
    named = mapping(where, value)
    for key in named:
        if key not in _SCHEMA_KEYS:
            raise LineError(f"{where} has an unknown key {show(key)}", code="unknown_parameter", param=f"{where}.{key}")
    string(f"{where}.name", named.get("name"))
    if named.get("strict") is not None:
        boolean(f"{where}.strict", named["strict"])
    if not isinstance(named.get("schema"), dict | bool):
        raise refuse(f"{where}.schema", named.get("schema"), "a JSON schema (an object)", code="invalid_type")


def _structured_outputs(value: dict[str, Any]) -> StructuredOutputs:
    known = FORMS
    for key in value:
        if key not in known:
            raise refuse(
                "structured_outputs", key, f"an object with one of {', '.join(known)}", code="unknown_parameter"
            )
    for key in ("regex", "grammar"):
        if value.get(key) is not None:
            string(f"structured_outputs.{key}", value[key])
    if value.get("json") is not None and not isinstance(value["json"], dict | bool | str):
        raise refuse("structured_outputs.json", value["json"], "a JSON schema", code="invalid_type")
    if value.get("json_object") is not None:
        boolean("structured_outputs.json_object", value["json_object"])
    if value.get("choice") is not None and not isinstance(value["choice"], list):
        raise refuse("structured_outputs.choice", value["choice"], "a list of strings", code="invalid_type")
    if value.get("structural_tag") is not None and not isinstance(value["structural_tag"], dict | str):
        raise refuse("structured_outputs.structural_tag", value["structural_tag"], "an object", code="invalid_type")
    return StructuredOutputs(**value)
