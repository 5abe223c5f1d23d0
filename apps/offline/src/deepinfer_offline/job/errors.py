"""The two ways a job goes wrong: one line of it, or all of it."""

from __future__ import annotations

import json
from typing import Any

SHOWN = 80  # characters of an offending value that a message repeats


class LineError(ValueError):
    """One input line cannot be answered as asked. It is answered with this error; the other lines go on.

    Attributes:
        message: one sentence that names the parameter, its value and what is allowed. The line number is added later.
        code: machine-readable reason.
        param: where in the request body the fault is, e.g. `messages[2].role`, or None.
        status: the HTTP status of the answer, 400..499.
        custom_id: the line's name where the line itself cannot be read but its name can, else None.
        owns_id: whether a later line with that name is a repetition; not where the line may be the torso of the later one.
    """

    def __init__(self, message: str, *, code: str = "invalid_value", param: str | None = None, status: int = 400):
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param
        self.status = status
        self.custom_id: str | None = None
        self.owns_id = True


class JobError(RuntimeError):
    """The job cannot start or cannot go on. The message is one sentence for the user."""


class JobStopped(Exception):  # noqa: N818 - the user wanted it: no error
    """The user interrupted the job; what was answered is in the journal."""


def show(value: Any) -> str:
    """Write an offending value for a message: text in single quotes, else JSON, cut to a readable length."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"
