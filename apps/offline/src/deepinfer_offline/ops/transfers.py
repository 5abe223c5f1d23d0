"""Copies between host and device that nobody waits for: up in one piece, down with an event."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

_ALIGN = 16  # bytes; what kernels assume of a pointer


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
    target[:size].copy_(here, non_blocking=True)


class StepClock:
    """Seconds that a step takes on its device: the stream's own time on CUDA, the wall clock elsewhere.

    A step that is enqueued while the one before still runs begins where that one ends: one mark in the stream serves both.

    Args:
        device: torch device string.
        after: clock of the step before on the same stream, stopped; None if there was none.
    """

    def __init__(self, device: str, after: StepClock | None = None) -> None:
        self._cuda = torch.device(device).type == "cuda"
        self._begin = after._end if after is not None and after._runs() else self._mark()
        self._end = self._begin

    def _runs(self) -> bool:
        return self._cuda and not self._end.query()

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def stop(self) -> None:
        """The step's last work has been enqueued."""
        self._end = self._mark()

    def wait(self) -> None:
        """Until that work is done. The caller's thread sleeps meanwhile."""
        if self._cuda:
            self._end.synchronize()

    def seconds(self) -> float:
        """Valid once the clock was stopped; waits."""
        if not self._cuda:
            return self._end - self._begin
        self.wait()
        return self._begin.elapsed_time(self._end) / 1e3


class Download:
    """Tensors on their way to the host.

    Args:
        tensors: of one device. What they hold is taken in the order of the stream, so they may be overwritten by work
            that is enqueued later.
        clock: of the step that they belong to; it is stopped behind them and before anybody waits. None: they have a mark of
            their own.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], clock: StepClock | None = None) -> None:
        self._end: torch.cuda.Event | None = None
        self._clock = clock
        if not tensors or tensors[0].device.type == "cpu":
            self._there = list(tensors)
            return
        self._there = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        for here, there in zip(tensors, self._there, strict=True):
            there.copy_(here, non_blocking=True)
        if clock is None:
            self._end = torch.cuda.Event()
            self._end.record()

    def wait(self) -> list[torch.Tensor]:
        """The tensors on the host, once they are there. The caller's thread sleeps meanwhile."""
        if self._end is not None:
            self._end.synchronize()
            self._end = None
        elif self._clock is not None:
            self._clock.wait()
        return self._there
