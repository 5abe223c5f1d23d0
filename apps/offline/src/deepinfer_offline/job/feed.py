"""The planning thread: makes the next window while the engine runs this one."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator

from deepinfer_offline.job.lines import Line
from deepinfer_offline.job.pending import Pending, Refused

Item = Pending | Refused
_POLL_SECONDS = 0.1


class Feed:
    """Windows, made one ahead on a thread of their own.

    Args:
        windows: makes windows of lines; runs on the thread.
        lines: the lines of INPUT.
    """

    def __init__(self, windows: Callable[[Iterator[Line]], Iterator[list[Item]]], lines: Iterator[Line]) -> None:
        self._windows = windows
        self._lines = lines
        self._ready: queue.Queue[list[Item] | BaseException | None] = queue.Queue(maxsize=1)
        self._items: deque[Item] = deque()
        self._finished = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="deepinfer-plan", daemon=True)
        self._thread.start()

    @property
    def finished(self) -> bool:
        """Whether every item was taken."""
        return self._finished and not self._items

    def take(self, *, wait: bool) -> Item | None:
        """The next item.

        Args:
            wait: whether to wait (a moment, not for ever) for a window that is not there yet.

        Returns:
            None when there is none now; ask `finished` whether there will be one.

        Raises:
            Exception: whatever went wrong while the window was made.
        """
        if not self._items and not self._finished:
            self._refill(wait)
        return self._items.popleft() if self._items else None

    def close(self) -> None:
        """Stop the thread."""
        self._closed.set()
        self._thread.join()

    def _refill(self, wait: bool) -> None:
        try:
            window = self._ready.get(timeout=_POLL_SECONDS) if wait else self._ready.get_nowait()
        except queue.Empty:
            return
        if isinstance(window, BaseException):
            raise window
        if window is None:
            self._finished = True
        else:
            self._items.extend(window)

    def _work(self) -> None:
        try:
            for window in self._windows(self._until_closed()):
                if not self._put(window):
                    return
            self._put(None)
        except BaseException as error:  # carried to the thread that takes
            self._put(error)

    def _until_closed(self) -> Iterator[Line]:
        for line in self._lines:
            if self._closed.is_set():
                return
            yield line

    def _put(self, window: list[Item] | BaseException | None) -> bool:
        while not self._closed.is_set():
            try:
                self._ready.put(window, timeout=_POLL_SECONDS)
                return True
            except queue.Full:
                continue
        return False
