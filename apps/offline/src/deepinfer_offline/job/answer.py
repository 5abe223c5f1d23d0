"""OUTPUT lines: OpenAI batch results, the same bytes for the same answer."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from deepinfer_offline.engine.base import RequestOutput
from deepinfer_offline.job.codec import dumps, loads
from deepinfer_offline.job.errors import LineError
from deepinfer_offline.job.fields import Kind
from deepinfer_offline.job.lines import Line

OK = 200
NO_RESPONSE = 0
"""Status of an answer whose `response` is null: the engine failed on it."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """What every answer of a job carries.

    Attributes:
        job: fingerprint of the model and of the options that shape answers.
        model: the name that requests are answered under.
        created: when the job began, seconds since 1970.
    """

    job: str
    model: str
    created: int

    def line_id(self, line: Line) -> str:
        """Name a line's answer by what was asked: 24 hex digits of its number, its bytes and the job."""
        return line_id(self.job, line)


def line_id(job: str, line: Line) -> str:
    """See `Stamp.line_id`. A finished OUTPUT is known to answer an INPUT by these."""
    digest = hashlib.blake2b(digest_size=12)
    digest.update(f"{job} {line.number} {line.fault or ''}\n".encode())
    digest.update(line.raw)
    return digest.hexdigest()


def refusal(key: str, custom_id: str | None, number: int, error: LineError) -> bytes:
    """The OUTPUT line of a request that cannot be run: a 4xx response with OpenAI's error object."""
    body = {
        "error": {
            "message": f"line {number}: {error.message}",
            "type": "invalid_request_error",
            "param": error.param,
            "code": error.code,
        }
    }
    return _result(key, custom_id, {"status_code": error.status, "request_id": f"req_{key}", "body": body}, None)


def failure(key: str, custom_id: str | None, number: int, message: str, code: str = "engine_error") -> bytes:
    """The OUTPUT line of a request that the engine (or this program) failed on: no response, only an error."""
    return _result(key, custom_id, None, {"code": code, "message": f"line {number}: {message}"})


def success(key: str, kind: Kind, custom_id: str, stamp: Stamp, output: RequestOutput, choices: list[Any]) -> bytes:
    """The OUTPUT line of an answered request."""
    chat = kind == "chat"
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{key}",
        "object": "chat.completion" if chat else "text_completion",
        "created": stamp.created,
        "model": stamp.model,
        "choices": choices,
        "usage": usage(output),
    }
    return _result(key, custom_id, {"status_code": OK, "request_id": f"req_{key}", "body": body}, None)


def usage(output: RequestOutput) -> dict[str, Any]:
    """OpenAI's token counts; the prompt counts once, whatever n is."""
    prompt = len(output.prompt_token_ids)
    completion = sum(len(choice.token_ids) for choice in output.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
    }


def copy_answer(result: bytes, original: int, number: int, key: str, custom_id: str | None) -> bytes:
    """The answer of a line that asks exactly what an earlier line asked.

    Args:
        result: the earlier line's OUTPUT line.
        original: the earlier line's number.
        number: the later line's number.
        key: the later line's id.
        custom_id: the later line's name.
    """
    value = loads(result)
    old = value["id"].removeprefix("batch_req_")
    value["id"], value["custom_id"] = f"batch_req_{key}", custom_id
    holder = value["error"]
    if value["response"] is not None:
        body = value["response"]["body"]
        value["response"]["request_id"] = f"req_{key}"
        if "id" in body:
            body["id"] = body["id"].replace(old, key)
            for choice in body["choices"]:
                for call in choice.get("message", {}).get("tool_calls") or ():
                    call["id"] = call["id"].replace(old, key)
        holder = body.get("error")
    if holder is not None:
        holder["message"] = f"line {number}: " + holder["message"].removeprefix(f"line {original}: ")
    return dumps(value)


def _result(key: str, custom_id: str | None, response: dict[str, Any] | None, error: dict[str, Any] | None) -> bytes:
    return dumps({"id": f"batch_req_{key}", "custom_id": custom_id, "response": response, "error": error})
