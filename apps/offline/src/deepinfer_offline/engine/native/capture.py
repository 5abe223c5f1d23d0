"""Recording work as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Recorder:
    """Records graphs on a stream of its own. All share one pool of memory: they are replayed one after the other.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None

    def record(self, work: Callable[[], T], *, warm_ups: int) -> tuple[torch.cuda.CUDAGraph, T]:
        """A graph of `work`, and what it returned: memory that every replay writes.

        Args:
            work: enqueues the same kernels over the same memory each time.
            warm_ups: times that it runs before: kernels compile and libraries choose in the first.
        """
        torch.cuda.current_stream(self._device).synchronize()
        with torch.cuda.stream(self._stream):
            for _ in range(warm_ups):
                work()
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                found = work()
            finally:
                graph.capture_end()
        self._pool = self._pool or graph.pool()
        return graph, found
