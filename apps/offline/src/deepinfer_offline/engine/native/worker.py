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

    def submit(self, call: Callable[[], Any], *, waits: bool = False) -> Future[Any]:
        """Run a call; `waits` says that it may wait for the device, or for something that the caller does later."""
        ...

    def close(self) -> None: ...


class InlineWorker:
    """Runs each call at once, in the caller's thread."""

    def submit(self, call: Callable[[], Any], *, waits: bool = False) -> Future[Any]:
        future: Future[Any] = Future()
        _run(call, future)
        if isinstance(interrupt := future.exception(), KeyboardInterrupt):
            raise interrupt  # it is this thread's, and no result for later calls to meet again
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

    def submit(self, call: Callable[[], Any], *, waits: bool = False) -> Future[Any]:
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


class DeviceWorker:
    """For calls that enqueue work on a device and return: they run at once, in the caller's thread.

    A thread of their own would only contend for the interpreter, with a turn lost at every operation that it enqueues. Calls
    that may wait go to one nevertheless, and so do later ones until it has caught up.
    """

    def __init__(self) -> None:
        self._thread = ThreadWorker(torch.get_num_threads())
        self._last: Future[Any] | None = None

    def submit(self, call: Callable[[], Any], *, waits: bool = False) -> Future[Any]:
        if waits or (self._last is not None and not self._last.done()):
            self._last = self._thread.submit(call)
            return self._last
        future: Future[Any] = Future()
        _run(call, future)
        if isinstance(interrupt := future.exception(), KeyboardInterrupt):
            raise interrupt  # it is this thread's, and no result for later calls to meet again
        return future

    def close(self) -> None:
        """Finish what was submitted, then stop. May be called again."""
        self._thread.close()


def _run(call: Callable[[], Any], future: Future[Any]) -> None:
    try:
        with torch.inference_mode():
            future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
