"""Recording work as a CUDA graph."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_LOG = logging.getLogger(__name__)


class Recorder:
    """Records graphs on a stream of its own. All share one pool of memory: they are replayed one after the other.

    Args:
        device: a CUDA device.

    Attributes:
        full: the device had no memory for a graph; no more are recorded.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None
        self.full = False

    def record(self, work: Callable[[], T], *, warm_ups: int) -> tuple[torch.cuda.CUDAGraph, T] | None:
        """A graph of `work`, and what it returned: memory that every replay writes.

        None when it is `full`: a step can do without a graph.

        Args:
            work: enqueues the same kernels over the same memory each time.
            warm_ups: times that it runs before: kernels compile and libraries choose in the first.
        """
        if self.full:
            return None
        try:
            return self._record(work, warm_ups)
        except RuntimeError as error:
            if not _says_full(error):
                raise
        self.full = True
        _LOG.warning("no memory is left to capture more steps; those that are not captured yet take longer")
        return None

    def _record(self, work: Callable[[], T], warm_ups: int) -> tuple[torch.cuda.CUDAGraph, T]:
        torch.cuda.current_stream(self._device).synchronize()
        with torch.cuda.stream(self._stream):
            for _ in range(warm_ups):
                work()
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                found = work()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # a broken capture: what broke it says more
                    graph.capture_end()
                raise
            graph.capture_end()
        self._pool = self._pool or graph.pool()
        return graph, found


def _says_full(error: RuntimeError) -> bool:
    """Torch's allocator has an error class for it; the driver, libraries and Triton say it in words."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    said = str(error).lower()
    return "out of memory" in said or "alloc_failed" in said
