"""Recording work as CUDA graphs, in memory that is set aside for all of them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import torch

from deepinfer_offline.engine.options import format_bytes

T = TypeVar("T")

SPARE_BYTES = 64 << 20
"""What graphs may take beyond their room: pieces of 2 MiB for small tensors, and workspaces of libraries."""

_LOG = logging.getLogger(__name__)


class ShortOfMemoryError(RuntimeError):
    """The device has no memory left for the work itself. That says nothing of a graph: later it may be recorded."""


class Recorder:
    """Records graphs on a stream of its own.

    They are replayed one after the other, so all work in the same memory: one room, taken at the start, as large as the
    largest graph needs it. What a graph returns lies there too, and is overwritten by the next one. A graph that needs more
    than the limit is not recorded, so graphs never take memory that steps without one need.

    Args:
        device: a CUDA device.
        room: bytes of the room.
        beside: bytes that graphs may take beyond it for work on other streams, whose memory is their own.

    Attributes:
        limit: most bytes that graphs may hold: `SPARE_BYTES` more than both.
        full: there was no memory for the room; nothing is recorded.
        taken: bytes that graphs hold, used or not.
    """

    def __init__(self, device: str, room: int, beside: int = 0) -> None:
        self._device, self._room, self.limit = device, room, room + beside + SPARE_BYTES
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None
        self._first: torch.cuda.CUDAGraph | None = None
        self.full, self.taken = False, 0
        self._first = self._open() if room else None
        self.full = self._first is None

    def record(self, work: Callable[[], T], *, warm_ups: int) -> tuple[torch.cuda.CUDAGraph, T] | None:
        """A graph of `work`, and what it returned: memory that a replay writes, until another graph is replayed or recorded.

        None where a graph finds no memory: a step can do without one.

        Args:
            work: enqueues the same kernels over the same memory each time, and returns a tensor or a tuple of them.
            warm_ups: times that it runs before: kernels compile and libraries choose in the first.

        Raises:
            ShortOfMemoryError: the device has none left to run it before.
        """
        if self.full:
            return None
        self._warm_up(work, warm_ups)
        try:
            graph, found = self._record(work)
        except RuntimeError as error:
            if not _says_full(error):
                raise
            _LOG.warning(
                "a step is not captured and takes longer: it needs more than the %s that captured steps may have",
                format_bytes(self.limit),
            )
            return None
        return graph, _unowned(found)

    def _open(self) -> torch.cuda.CUDAGraph | None:
        """Take the room: a graph of nothing but that, which keeps it for the others. None if there is no memory."""
        try:
            return self._record(lambda: torch.empty(self._room, dtype=torch.uint8, device=self._device)[:1].zero_())[0]
        except RuntimeError as error:
            if not _says_full(error):
                raise
        _LOG.warning("no %s of memory are left to capture steps in; steps take longer", format_bytes(self._room))
        return None

    def _warm_up(self, work: Callable[[], Any], times: int) -> None:
        """Run the work with all memory that is there, which the limit of graphs is not about."""
        torch.cuda.current_stream(self._device).synchronize()
        try:
            with torch.cuda.stream(self._stream):
                for _ in range(times):
                    work()
            self._stream.synchronize()
        except RuntimeError as error:
            if not _says_full(error):
                raise
            self._stream.synchronize()  # what was enqueued so far
            raise ShortOfMemoryError(f"no memory is left on {self._device} to run a step before its capture") from error

    def _record(self, work: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        torch.cuda.current_stream(self._device).synchronize()
        with torch.cuda.stream(self._stream):
            _make_workspace(self._device)
            torch.cuda.empty_cache()  # what warm-ups leave is of no other stream's use, and torch frees nothing in a capture
            graph = torch.cuda.CUDAGraph()
            with self._counted():
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

    @contextlib.contextmanager
    def _counted(self) -> Generator[None]:
        """Count what torch takes from the device meanwhile, and let it take no more than graphs may have."""
        before, kept = (
            torch.cuda.memory_reserved(self._device),
            torch.cuda.get_per_process_memory_fraction(self._device),
        )
        share = (before + self.limit - self.taken) / _total_bytes(self._device)
        torch.cuda.set_per_process_memory_fraction(min(share, kept), self._device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(kept, self._device)
            self.taken += torch.cuda.memory_reserved(self._device) - before


def _make_workspace(device: str) -> None:
    """cuBLAS has a workspace for each stream, made in its first product: of the room it would be gone for good."""
    one = torch.ones(1, 1, device=device)
    torch.mm(one, one)


def _total_bytes(device: str) -> int:
    """Of the device. The allocator takes a share of one of these figures, and should rather allow a little too much."""
    return min(torch.cuda.mem_get_info(device)[1], torch.cuda.get_device_properties(device).total_memory)


class _Memory:
    """A piece of device memory, as `torch.as_tensor` takes it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (tensor.nbytes,), "typestr": "|u1", "data": (tensor.data_ptr(), False), "version": 2,
        }  # fmt: skip


def _unowned(found: Any) -> Any:
    """The same contiguous tensors, but their memory is free for other graphs."""
    if isinstance(found, tuple):
        return tuple(map(_unowned, found))
    assert found.is_contiguous()
    if not found.numel():
        return found
    return torch.as_tensor(_Memory(found), device=found.device).view(found.dtype).view(found.shape)


def _says_full(error: RuntimeError) -> bool:
    """Torch's allocator has an error class for it; the driver, libraries and Triton say it in words."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    said = str(error).lower()
    return "out of memory" in said or "alloc_failed" in said
