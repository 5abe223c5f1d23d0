"""Start-up failures with their cause: vLLM's worker processes print it, and its front end says only "see above"."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager

_CAUSE = re.compile(
    r"^(?:\([^)]*\)\s*)?(?:(?:ERROR|CRITICAL)\b.*?\]\s*)?((?:\w+\.)*\w*(?:Error|Exception|Exit)): (.+)$"
)
_KEEP = 1 << 20
_LONGEST = 300  # characters of a cause; what comes after them is advice on vLLM's own command line, or a list
# What vLLM says in terms of its own flags, in terms of ours.
_ADVICE = (
    (r"No available memory for the cache blocks.*", "there is no memory for the KV cache: give more with --kv-memory"),
    (r"Model architectures \['(.+?)'\] are not supported for now.*", r"this vLLM has no model \1; --engine native may have it"),
    (r"Total number of attention heads \((\d+)\) must be divisible by tensor parallel size \((\d+)\).*",
     r"\1 attention heads cannot be spread over \2 workers: --tensor-parallel must divide \1"),
    (r"User-specified max_model_len \((\d+)\) is greater than the derived max_model_len \(\w+=(\d+).*",
     r"--max-model-len \1 is more than the model's context of \2 tokens"),
    (r"Couldn't instantiate the backend tokenizer.*",
     "the model's folder has no tokenizer that can be read: is tokenizer.json there?"),
    (r"SafetensorError: (.*)", r"a weight file is cut off or damaged: \1"),
    (r"start \(\d+\) \+ length \((\d+)\) exceeds dimension size \((\d+)\).*",
     r"the weights are not of the size that config.json asks for: \2 where \1 is wanted"),
)  # fmt: skip
_EMPTY = ("Engine core initialization failed", "WorkerProc initialization failed", "See root cause")


def root_cause(log: str) -> str | None:
    """Return the last exception line in a log that says something: `ValueError: max_model_len ...`."""
    for line in reversed(log.splitlines()):
        match = _CAUSE.match(line.strip())
        if match and not any(phrase in line for phrase in _EMPTY):
            return f"{match[1].rsplit('.', 1)[-1]}: {match[2]}"
    return None


def tidy(cause: str) -> str:
    """Strip what libraries wrap around a reason: pydantic's frame, vLLM's quoting of a worker's error."""
    cause = re.sub(r"^\w+: \d+ validation errors? for \w+\n(\S+)\n", r"\1: ", cause)  # the field that is wrong
    cause = " ".join(cause.split())
    cause = re.sub(r"^\w+: \d+ validation errors? for \w+ ", "", cause)
    cause = re.sub(r"^(\S+: )?Value error, ", lambda found: found[1] or "", cause)
    cause = re.sub(r" \[type=.*$", "", cause)
    quoted = re.match(r"^\w+: Worker failed with error '(.*)', please check the stack trace", cause)
    cause = quoted[1] if quoted else cause
    for pattern, advice in _ADVICE:
        found = re.search(pattern, cause)
        if found:
            return found.expand(advice)
    if len(cause) <= _LONGEST:
        return cause
    end = cause.rfind(". ", 0, _LONGEST)
    return cause[: end + 1] if end > 0 else f"{cause[:_LONGEST]}..."


class Log:
    """The last mebibyte of what was printed since the capture began; worker processes may go on writing to it."""

    def __init__(self) -> None:
        self._data = bytearray()

    def write(self, chunk: bytes) -> None:
        self._data += chunk
        del self._data[:-_KEEP]

    @property
    def text(self) -> str:
        return bytes(self._data).decode(errors="replace")


@contextmanager
def captured_output(*, show: bool) -> Generator[Log]:
    """Capture file descriptors 1 and 2, those of child processes included.

    Args:
        show: pass everything on to stderr. Otherwise it is kept for `root_cause` alone.

    Child processes inherit the pipe for their whole life, so a daemon thread drains it until the last one ends.
    """
    log = Log()
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    read, write = os.pipe()
    os.dup2(write, 1)
    os.dup2(write, 2)
    os.close(write)

    def drain() -> None:
        while chunk := os.read(read, 65536):
            log.write(chunk)
            if show:
                os.write(saved[1], chunk)
        os.close(read)

    thread = threading.Thread(target=drain, daemon=True)
    thread.start()
    try:
        yield log
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(saved[0], 1)
        os.dup2(saved[1], 2)
        thread.join(timeout=0.3)  # ends at once when no child is left; else what matters has arrived by then
