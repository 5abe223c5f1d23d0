"""How the command line says that something went wrong: one sentence on standard error, never a traceback."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import traceback as tracebacks
from pathlib import Path

from deepinfer_offline.engine.base import EngineStartError
from deepinfer_offline.engine.options import OptionsError
from deepinfer_offline.job.errors import JobError

ALL_ANSWERED, SOME_FAILED, COULD_NOT_START, NO_REPORT, INTERRUPTED = 0, 1, 2, 3, 130
"""Exit statuses. 2 means that there is no new OUTPUT: the run could not start, or could not go on. 3 means that there is
one, whole, and only the report is missing."""

_EXPECTED = (JobError, EngineStartError, OptionsError)


def complain(sentence: str) -> None:
    """Print one sentence about a failure."""
    with contextlib.suppress(BrokenPipeError):  # no one reads it; the exit status says it, too
        print(f"deepinfer: {' '.join(sentence.split())}", file=sys.stderr, flush=True)


def explain(error: Exception, *, traceback: bool, kept: str = "") -> int:
    """Say what went wrong.

    Args:
        error: what was raised. A traceback is worth showing only for errors that are not foreseen.
        traceback: print it rather than write it to a file.
        kept: one more sentence, about what is not lost.

    Returns:
        The exit status.
    """
    sentence = str(error)
    if not isinstance(error, _EXPECTED):
        where = "the traceback is above" if traceback else f"the traceback is in {_write_traceback(error)}"
        sentence = f"internal error, {type(error).__name__}: {error or 'no message'}; {where}"
    if traceback:
        tracebacks.print_exception(error)
    complain(f"{sentence}{kept}")
    return COULD_NOT_START


def _write_traceback(error: Exception) -> Path:
    with tempfile.NamedTemporaryFile("w", prefix="deepinfer-", suffix=".log", delete=False, encoding="utf-8") as file:
        tracebacks.print_exception(error, file=file)
    return Path(file.name)
