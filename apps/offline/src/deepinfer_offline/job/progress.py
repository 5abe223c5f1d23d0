"""What the user sees while a job runs: a live bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn
from rich.text import Text

PLAIN_SECONDS = 10.0
_RATE_SECONDS = 30.0  # tokens/s are of this long


class Reporter(Protocol):
    """Receives what happens."""

    def phase(self, name: str, total: int | None = None) -> None:
        """A phase begins; `total` is how many lines it has, if that is known."""

    def update(self, done: int, *, tokens: int = 0, hit_rate: float | None = None, failed: int = 0) -> None:
        """`done` lines of the phase are behind us, with `tokens` computed so far."""

    def note(self, text: str) -> None:
        """One sentence that stays on the screen."""

    def close(self) -> None: ...


class Rate:
    """Tokens per second and time left, over the last `_RATE_SECONDS`."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int, int]] = deque()

    def add(self, done: int, tokens: int) -> None:
        """Note where we are."""
        now = time.monotonic()
        self._points.append((now, done, tokens))
        while len(self._points) > 2 and now - self._points[1][0] > _RATE_SECONDS:
            self._points.popleft()

    def tokens_per_second(self) -> float:
        """Prompt and new tokens together, 0 when nothing is known."""
        seconds = self._points[-1][0] - self._points[0][0] if self._points else 0
        return (self._points[-1][2] - self._points[0][2]) / seconds if seconds > 0 else 0.0

    def seconds_left(self, total: int) -> float | None:
        """None when nothing is known."""
        if len(self._points) < 2:
            return None
        (start, before, _), (end, now, _) = self._points[0], self._points[-1]
        return (total - now) * (end - start) / (now - before) if now > before else None


def describe(rate: Rate, total: int, hit_rate: float | None, failed: int) -> str:
    """The facts beside the bar."""
    parts = []
    if speed := rate.tokens_per_second():
        parts.append(f"{speed:,.0f} tok/s")
    if hit_rate is not None:
        parts.append(f"{hit_rate:.0%} cached")
    if failed:
        parts.append(f"{failed} failed")
    left = rate.seconds_left(total)
    if left is not None:
        parts.append(f"{clock(left)} left")
    return ", ".join(parts)


def clock(seconds: float) -> str:
    """`1:02:03`, `2:03` or `0:03`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


class Messages(Console):
    """Standard error. Nothing more is written when its reader is gone (`2>&1 | head`); the job goes on."""

    def __init__(self) -> None:
        super().__init__(stderr=True)

    def on_broken_pipe(self) -> None:
        """See Console, which would exit."""
        self.quiet = True


class LiveReporter:
    """A bar for terminals.

    Args:
        console: where to draw.
    """

    def __init__(self, console: Console) -> None:
        self._rate = Rate()
        self._total: int | None = None
        self._task: TaskID | None = None
        self._shown_at = 0.0
        columns = (SpinnerColumn(), TextColumn("{task.description:<14}"), BarColumn(), MofNCompleteColumn())
        self._progress = Progress(*columns, TextColumn("{task.fields[facts]}"), console=console, transient=True)
        self._progress.start()

    def phase(self, name: str, total: int | None = None) -> None:
        """See Reporter."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._rate, self._total = Rate(), total
        self._task = self._progress.add_task(name, total=total, facts="")

    def update(self, done: int, *, tokens: int = 0, hit_rate: float | None = None, failed: int = 0) -> None:
        """See Reporter."""
        now = time.monotonic()
        if self._task is None or now - self._shown_at < 0.1:
            return
        self._shown_at = now
        self._rate.add(done, tokens)
        facts = describe(self._rate, self._total, hit_rate, failed) if self._total else ""
        self._progress.update(self._task, completed=done, facts=facts)

    def note(self, text: str) -> None:
        """See Reporter."""
        self._progress.console.print(Text(text))

    def close(self) -> None:
        """See Reporter."""
        self._progress.stop()


class PlainReporter:
    """Lines for logs and pipes.

    Args:
        console: where to print.
        every: seconds between two lines of one phase.
    """

    def __init__(self, console: Console, every: float = PLAIN_SECONDS) -> None:
        self._console = console
        self._every = every
        self._name = ""
        self._total: int | None = None
        self._rate = Rate()
        self._shown_at = 0.0

    def phase(self, name: str, total: int | None = None) -> None:
        """See Reporter."""
        self._name, self._total, self._rate = name, total, Rate()
        self._shown_at = time.monotonic()
        self._print(f"{name} ..." if total is None else f"{name}: {total:,} lines")

    def update(self, done: int, *, tokens: int = 0, hit_rate: float | None = None, failed: int = 0) -> None:
        """See Reporter."""
        now = time.monotonic()
        self._rate.add(done, tokens)
        if now - self._shown_at < self._every:
            return
        self._shown_at = now
        if self._total is None:
            self._print(f"{self._name}: {done:,} lines")
        else:
            facts = describe(self._rate, self._total, hit_rate, failed)
            self._print(f"{self._name}: {done:,}/{self._total:,} ({done / self._total:.0%}), {facts}")

    def note(self, text: str) -> None:
        """See Reporter."""
        self._print(text)

    def close(self) -> None:
        """See Reporter."""

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)


class SilentReporter:
    """Says nothing."""

    def phase(self, name: str, total: int | None = None) -> None:
        """See Reporter."""

    def update(self, done: int, *, tokens: int = 0, hit_rate: float | None = None, failed: int = 0) -> None:
        """See Reporter."""

    def note(self, text: str) -> None:
        """See Reporter."""

    def close(self) -> None:
        """See Reporter."""


@contextmanager
def open_reporter(quiet: bool) -> Generator[Reporter]:
    """The reporter that fits where standard error goes."""
    console = Messages()
    reporter = SilentReporter() if quiet else LiveReporter(console) if console.is_terminal else PlainReporter(console)
    try:
        yield reporter
    finally:
        reporter.close()
