"""Ctrl-C as a wish: the step that runs is finished and its answers are kept."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopFlag:
    """While it is entered, the first SIGINT or SIGTERM sets a flag; the second one raises KeyboardInterrupt.

    Outside the main thread, where Python allows no handlers, it never sets.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopFlag:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._stop) for number in _SIGNALS}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True
