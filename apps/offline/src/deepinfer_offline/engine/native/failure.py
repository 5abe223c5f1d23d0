"""What broke an engine off between a plan and its result."""

from __future__ import annotations

import contextlib
from collections.abc import Generator


class Failure:
    """Remembers the error that left scheduler and runner at odds: a step stays in flight for good, and a loop would wait for it.

    An error that a step itself raised is none: the step is still there, and taking it raises the same again.
    """

    def __init__(self) -> None:
        self._error: BaseException | None = None

    def check(self) -> None:
        """Raise RuntimeError if there was one."""
        if self._error is not None:
            raise RuntimeError(f"the engine failed before ({self._error}); start another one") from self._error

    @contextlib.contextmanager
    def watch(self) -> Generator[None]:
        """What is raised in here is one, an interrupt too."""
        try:
            yield
        except BaseException as error:
            self._error = error
            raise
