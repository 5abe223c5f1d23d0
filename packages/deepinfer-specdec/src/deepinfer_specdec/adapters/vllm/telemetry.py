"""What real steps tell, brought to the host without making anything wait: their time, and what became of their drafts."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MARKS = 32  # events in use at most; when the device is that far behind, steps go unmeasured
_RING = 4  # outcomes in flight


class _HostMark:
    """A point in time on a device that runs what it is told at once."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _HostMark) -> float:
        """Milliseconds to `end`, as `torch.cuda.Event` counts."""
        return (end._at - self._at) * 1e3


@dataclass(slots=True)
class _Lap:
    before: Any  # end of the lap before, None when nothing ran directly before
    start: Any
    end: Any
    requests: int
    tokens: int
    drafted: bool


class StepClock:
    """Times steps on the device's stream by events, which are read once they have passed.

    A step's time includes the gap since the step before it, since that is time without tokens too; a gap of more than
    half the step is taken for a pause of the work, not for its cost.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type != "cpu"
        self._laps: deque[_Lap] = deque()
        self._last: Any = None
        self._start: Any = None

    def start(self) -> None:
        """A step's forward pass begins."""
        self._start = self._mark() if len(self._laps) < _MARKS else None

    def stop(self, requests: int, tokens: int, drafted: bool = True) -> None:
        """The step has drafted, if it does: everything between is its time."""
        if self._start is None:
            self._last = None
            return
        end = self._mark()
        self._laps.append(_Lap(self._last, self._start, end, requests, tokens, drafted))
        self._last, self._start = end, None

    def skip(self) -> None:
        """A step ran that is not measured."""
        self._last = self._start = None

    def take(self) -> list[tuple[int, int, float, bool]]:
        """(requests, tokens, milliseconds, drafted) of the steps that have ended meanwhile."""
        out = []
        while self._laps and self._laps[0].end.query():
            lap = self._laps.popleft()
            took = lap.start.elapsed_time(lap.end)
            gap = lap.before.elapsed_time(lap.start) if lap.before is not None else 0.0
            took += gap if 0.0 < gap <= 0.5 * took else 0.0
            out.append((lap.requests, lap.tokens, took, lap.drafted))
        return out

    def _mark(self) -> Any:
        if not self._on_device:
            return _HostMark()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Outcomes:
    """Carries rows of (confidences of a block, verified, accepted) to the host.

    Args:
        slots: requests that can run at once.
        width: drafts a request.
        device: where the rows are made.
    """

    def __init__(self, slots: int, width: int, device: torch.device) -> None:
        self._on_device = device.type != "cpu"
        self._free = [torch.empty(slots, width + 2, pin_memory=self._on_device) for _ in range(_RING)]
        self._flying: deque[tuple[Tensor, int, Any]] = deque()

    def put(self, confidences: Tensor, verified: Tensor, accepted: Tensor) -> None:
        """Send [R, K], [R] and [R] off; dropped when the device is several steps behind."""
        if not self._free:
            return
        rows = torch.cat([confidences, verified[:, None].float(), accepted[:, None].float()], dim=1)
        target = self._free.pop()
        target[: rows.shape[0]].copy_(rows, non_blocking=True)
        event: Any = None
        if self._on_device:
            event = torch.cuda.Event()
            event.record()
        self._flying.append((target, rows.shape[0], event))

    def take(self) -> list[NDArray[np.float32]]:
        """float32 [R, K + 2] for each step whose rows have arrived."""
        out = []
        while self._flying and (self._flying[0][2] is None or self._flying[0][2].query()):
            target, rows, _ = self._flying.popleft()
            out.append(target[:rows].numpy().copy())
            self._free.append(target)
        return out
