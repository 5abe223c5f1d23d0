"""Work that is captured when it occurs again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from deepinfer_offline.engine.native.capture import Recorder

_LOG = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)
B = TypeVar("B")
T = TypeVar("T")


@dataclass(slots=True)
class _Prepared(Generic[B]):
    """A bucket that has occurred.

    Attributes:
        buffers: its inputs.
        ran: whether the work was done over them: kernels are compiled, and libraries have chosen.
        tried: whether it was tried to capture it, which is done once.
        graph, left: of what is captured, and what a replay leaves.
    """

    buffers: B
    ran: bool = False
    tried: bool = False
    graph: Any = None
    left: Any = None


class Repeated(Generic[K, B, T]):
    """One piece of work for each bucket, over buffers that stay where they are: run when the bucket first occurs, captured when
    it occurs again, and replayed from then on. Used by the thread that runs the steps.

    A capture needs no run before it then, so nothing ever runs but steps.

    Args:
        recorder: records graphs.
        make: a bucket's buffers.
        work: enqueues the same kernels over the same memory each time, and returns a tensor or a tuple of them.
        most: graphs.

    Attributes:
        tries: captures so far, those that found no memory among them.
        firsts: runs so far that took longer than others of their bucket will: the first one, which may build kernels, and the one
            that is captured.
    """

    def __init__(self, recorder: Recorder, make: Callable[[K], B], work: Callable[[B], T], most: int) -> None:
        self._recorder, self._make, self._work, self._most = recorder, make, work, most
        self._prepared: dict[K, _Prepared[B]] = {}
        self.tries = self.firsts = 0

    @property
    def captured(self) -> list[K]:
        """Buckets that are replayed, in the order in which they occurred."""
        return [bucket for bucket, found in self._prepared.items() if found.graph is not None]

    def buffers(self, bucket: K) -> B:
        """Where the bucket's next run finds its inputs."""
        if bucket not in self._prepared:
            self._prepared[bucket] = _Prepared(self._make(bucket))
        return self._prepared[bucket].buffers

    def run(self, bucket: K) -> T:
        """Enqueue the work over what was put into the bucket's buffers.

        What it returns is overwritten by the next captured step, in the order of the stream: all work in the same memory.
        """
        found = self._prepared[bucket]
        captures = found.ran and not found.tried and self.tries < self._most
        self.firsts += captures or not found.ran
        if captures:
            self._capture(bucket, found)
        found.ran = True
        if found.graph is None:
            return self._work(found.buffers)
        found.graph.replay()
        return found.left

    def _capture(self, bucket: K, found: _Prepared[B]) -> None:
        found.tried, start = True, time.perf_counter()
        self.tries += 1
        recorded = self._recorder.record(lambda: self._work(found.buffers), warm_ups=0)
        if recorded is None:
            return
        found.graph, found.left = recorded
        _LOG.info("captured a step of %s in %.2f s", bucket, time.perf_counter() - start)
