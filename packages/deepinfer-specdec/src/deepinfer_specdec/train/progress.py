"""How far a long piece of work is: one line on stderr, rewritten a few times a second; plain lines when it is no terminal."""

from __future__ import annotations

import sys
import time


class Progress:
    """A bar. `first` of `total` were done before this run; `doing` is said before it."""

    def __init__(self, doing: str, first: int, total: int, show: bool = True) -> None:
        self._doing, self._first, self._total, self._show = doing, first, total, show
        self._begin = self._last = time.monotonic()

    def show(self, done: int, says: str = "") -> None:
        """`done` of the total are done now."""
        now = time.monotonic()
        terminal = sys.stderr.isatty()
        if not self._show or (now - self._last < (0.2 if terminal else 30.0) and done < self._total):
            return
        self._last = now
        left = (now - self._begin) / max(1, done - self._first) * (self._total - done)
        filled = 30 * done // self._total
        bar = f"{self._doing} [{'#' * filled}{'.' * (30 - filled)}] {done}/{self._total}"
        text = f"{bar}{says and '  '}{says}  {left:.0f} s left"
        print(f"\r{text}" if terminal else text, end="" if terminal else "\n", file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the line."""
        if self._show and sys.stderr.isatty():
            print(file=sys.stderr)
