"""A process that does risky work for another: it may hang, run out of memory or die without harm.

`python -m deepinfer_structured.worker MIB` reads pickled calls `(module, function, arguments)` from stdin and writes
pickled answers to stdout. Only the parent talks to it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import selectors
import struct
import subprocess
import sys
import threading
import time
from typing import IO, Any

from deepinfer_structured.errors import LimitExceeded, StructuredError

_POLL = 0.25  # seconds between two looks at a worker that has not answered
_PATIENCE = 8  # times its limit of processor time that a worker may take by the clock


def _processor_seconds(pid: int) -> float | None:
    """Processor time of a process so far; None where the system does not say."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None


class Worker:
    """One warm process; calls are served one at a time. It is started on the first call and again after it died.

    Args:
        memory_mib: address space of the process; 0 leaves it unlimited.
    """

    def __init__(self, memory_mib: int = 4096) -> None:
        self.memory_mib = memory_mib
        self.restarts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def call(self, module: str, function: str, arguments: tuple[Any, ...], timeout: float) -> Any:
        """Run `module.function(*arguments)` in the process and return its result.

        Raises:
            StructuredError: raised by the function.
            LimitExceeded: no answer within `timeout` seconds of processor time, or the process died.
        """
        with self._lock:
            process = self._running()
            try:
                assert process.stdin is not None
                _write(process.stdin, (module, function, arguments))
                answer = self._read(process, timeout)
            except (OSError, EOFError, pickle.UnpicklingError):
                self._kill()
                raise LimitExceeded("compiling this constraint ended the worker process") from None
        kind, value = answer
        if kind == "error":
            raise value
        return value

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.restarts += self._process is not None
            command = [sys.executable, "-m", "deepinfer_structured.worker", str(self.memory_mib)]
            path = os.pathsep.join(p for p in sys.path if p)
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
            )
        return self._process

    def _read(self, process: subprocess.Popen[bytes], timeout: float) -> tuple[str, Any]:
        assert process.stdout is not None
        descriptor, data = process.stdout.fileno(), b""
        begin, used = time.monotonic(), _processor_seconds(process.pid)
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while len(data) < 8 or len(data) < 8 + struct.unpack("<Q", data[:8])[0]:
                if not selector.select(min(_POLL, timeout / 4)):
                    passed = time.monotonic() - begin
                    # On a busy machine processor time counts; a worker that waits for ever shows in the clock alone.
                    spent = passed if used is None else (_processor_seconds(process.pid) or 0.0) - used
                    if spent > timeout or passed > _PATIENCE * timeout:
                        self._kill()
                        raise LimitExceeded(f"compiling this constraint takes more than {timeout:g} s")
                    continue
                piece = os.read(descriptor, 1 << 20)
                if not piece:
                    raise EOFError
                data += piece
        return pickle.loads(data[8:])

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
            self._process = None
            self.restarts += 1

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._kill()


def _write(stream: IO[bytes], value: Any) -> None:
    data = pickle.dumps(value)
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def _serve(source: IO[bytes], target: IO[bytes]) -> None:
    while head := source.read(8):
        module, function, arguments = pickle.loads(source.read(struct.unpack("<Q", head)[0]))
        try:
            answer: tuple[str, Any] = ("ok", getattr(importlib.import_module(module), function)(*arguments))
        except StructuredError as error:
            answer = ("error", error)
        except MemoryError:
            answer = ("error", LimitExceeded("compiling this constraint needs too much memory"))
        except Exception as error:
            answer = ("error", StructuredError(f"internal error: {type(error).__name__}: {error}"))
        _write(target, answer)


def main() -> None:
    """Serve calls until stdin closes."""
    limit = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    if limit:
        with contextlib.suppress(ImportError, ValueError, OSError):
            import resource

            resource.setrlimit(resource.RLIMIT_AS, (limit << 20, limit << 20))
    target = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # stray prints of libraries must not mix with answers
    _serve(sys.stdin.buffer, target)


if __name__ == "__main__":
    main()
