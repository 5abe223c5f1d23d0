"""Where a step runs: in a thread of its own (planning overlaps) or right here."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

import torch


class Worker(Protocol):
    """Runs calls one after another, in the order of `submit`."""

    def submit(self, call: Callable[[], Any]) -> Future[Any]: ...

    def close(self) -> None: ...


class InlineWorker:
    """Runs each call at once, in the caller's thread."""

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        _run(call, future)
        return future

    def close(self) -> None:
        """Nothing to stop."""


class ThreadWorker:
    """Runs calls in one thread. Torch releases the interpreter lock in its kernels, so the caller goes on meanwhile.

    Args:
        num_threads: kernel threads of the calls. Torch keeps this number per thread, so it is set in the new one.
    """

    def __init__(self, num_threads: int) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._loop, args=(num_threads,), name="deepinfer-steps", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        if self._closed:
            raise RuntimeError("the worker is closed")
        future: Future[Any] = Future()
        self._calls.put((call, future))
        return future

    def close(self) -> None:
        """Finish what was submitted, then stop. May be called again."""
        if not self._closed:
            self._closed = True
            self._calls.put(None)
        self._thread.join()

    def _loop(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        while (item := self._calls.get()) is not None:
            _run(*item)


def _run(call: Callable[[], Any], future: Future[Any]) -> None:
    try:
        with torch.inference_mode():
            future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
