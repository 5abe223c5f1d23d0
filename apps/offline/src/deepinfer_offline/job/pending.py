"""A request on its way through the engine, with what is needed to write its answer."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_offline.engine.base import Request
from deepinfer_offline.job.fields import Kind


@dataclass(frozen=True, slots=True)
class Pending:
    """One request, ready to run.

    Attributes:
        record: its record number in the job.
        number: its line number, for messages.
        key: the id of its answer.
        custom_id: the user's name of it.
        kind: the endpoint.
        request: what the engine gets.
        prompt_text: the prompt's text when the answer starts with it (`echo`), else None.
        tool_choice: see `Task.tool_choice`.
        tool_names: names of the tools that the model was shown.
    """

    record: int
    number: int
    key: str
    custom_id: str
    kind: Kind
    request: Request
    prompt_text: str | None = None
    tool_choice: str = "none"
    tool_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """One line that is answered without the engine: its OUTPUT line is ready."""

    record: int
    status: int
    result: bytes
