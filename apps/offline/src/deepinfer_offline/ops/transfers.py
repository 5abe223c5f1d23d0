"""Copies between host and device that nobody waits for: up in one piece, down with an event."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from deepinfer_offline.ops.cuda.support import kernels

BY_KERNEL = True
_ALIGN = 16  # bytes; what kernels assume of a pointer
_WORDS = (torch.int32, torch.int64, torch.float32)
_MOST = 1 << 18  # elements that a kernel copies; a copy engine takes more


def upload(arrays: Sequence[np.ndarray], device: str | torch.device) -> list[torch.Tensor]:
    """The arrays on the device, in their shapes and dtypes.

    To an accelerator they travel as one copy from pinned memory, in the order of the stream; torch keeps that memory from
    being used again before the copy is done. On a CPU they are the arrays themselves where these are contiguous.
    """
    arrays = [np.ascontiguousarray(array) for array in arrays]
    if torch.device(device).type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts, size = [], 0
    for array in arrays:
        starts.append(size)
        size += -(-array.nbytes // _ALIGN) * _ALIGN
    pinned = torch.empty(max(size, 1), dtype=torch.uint8, pin_memory=True)
    flat = pinned.numpy()
    for array, start in zip(arrays, starts, strict=True):
        flat[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    there = pinned.to(device, non_blocking=True)
    found = []
    for array, start in zip(arrays, starts, strict=True):
        dtype = torch.from_numpy(array[:0] if array.ndim else array.reshape(1)).dtype
        found.append(there[start : start + array.nbytes].view(dtype).view(array.shape))
    return found


def upload_into(target: torch.Tensor, arrays: Sequence[np.ndarray]) -> None:
    """The arrays one after the other at the beginning of a tensor that is there already, as one copy in the order of the stream.

    Args:
        target: [any], on any device.
        arrays: integers that fit target's dtype; they are converted to it.

    Raises:
        ValueError: there is no room for them.
    """
    size = sum(array.size for array in arrays)
    if size > len(target):
        raise ValueError(f"{size} elements do not fit a tensor of {len(target)}")
    here = torch.empty(size, dtype=target.dtype, pin_memory=target.device.type == "cuda")
    flat, start = here.numpy(), 0
    for array in arrays:
        flat[start : start + array.size] = array.reshape(-1)
        start += array.size
    _copy(here, target[:size])


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Between a device and pinned memory, in the order of the stream. Whole words go by a kernel, if there is one.

    A step waits for its inputs, and the next one for its tokens: handing over to a copy engine and back takes longer.
    """
    device, pinned = (target.device, source) if source.device.type == "cpu" else (source.device, target)
    copy_words = _copy_words(device) if BY_KERNEL else None
    fits = source.dtype in _WORDS and source.is_contiguous() and 0 < source.numel() <= _MOST
    if copy_words is None or not fits:
        target.copy_(source, non_blocking=True)
        return
    copy_words(source.view(-1).view(torch.int32), target.view(-1).view(torch.int32))
    _keep(pinned)


@lru_cache(maxsize=16)
def _copy_words(device: torch.device) -> Callable[[torch.Tensor, torch.Tensor], None] | None:
    found = kernels() if device.type == "cuda" else None
    return None if found is None or found.is_supported("copy_words", device) is not None else found.copy_words


_kept: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()
"""Pinned memory that kernels may still read, oldest first."""


def _keep(pinned: torch.Tensor) -> None:
    """Keep pinned memory until what was enqueued so far has run."""
    event = torch.cuda.Event()
    while _kept:
        oldest = _kept.popleft()
        if not oldest[0].query():
            _kept.appendleft(oldest)
            break
        event = oldest[0]
    event.record()
    _kept.append((event, pinned))


class Download:
    """Tensors on their way to the host.

    Args:
        tensors: of one device. What they hold is taken in the order of the stream, so they may be overwritten by work
            that is enqueued later.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        if not tensors or tensors[0].device.type == "cpu":
            self._there = list(tensors)
            return
        self._there = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        for here, there in zip(tensors, self._there, strict=True):
            _copy(here, there)
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> list[torch.Tensor]:
        """The tensors on the host, once they are there. The caller's thread sleeps meanwhile."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._there


_SPARE: dict[str, list[Any]] = {}
"""Timing events by device that nobody waits for: making one takes as long as everything else that a clock does."""


class StepClock:
    """Seconds that a step takes on its device: the stream's own time on CUDA, the wall clock elsewhere."""

    def __init__(self, device: str) -> None:
        self._cuda = torch.device(device).type == "cuda"
        self._spare = _SPARE.setdefault(device, [])
        self._begin = self._end = self._mark()

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def stop(self) -> None:
        """The step's last work has been enqueued."""
        self._end = self._mark()

    def seconds(self) -> float:
        """Asked once, when the step's results are on the host."""
        if not self._cuda:
            return self._end - self._begin
        self._end.synchronize()
        seconds = self._begin.elapsed_time(self._end) / 1e3
        if self._end is not self._begin:
            self._spare += (self._begin, self._end)
        return seconds
