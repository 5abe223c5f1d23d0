"""Work of a decode step that does not wait for its neighbour: on a second stream, which a captured graph keeps as a branch.

Few rows leave most of the chip to whoever else has work: small kernels of one branch then run under the weights that the
other reads, and their gaps are nobody's.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

ASIDE_ROWS = 256
"""Most rows of a branch: above, a kernel fills the chip and a second one only takes turns with it."""


class Aside:
    """One branch beside the current stream; everything runs in order where there is no CUDA.

    Memory: every fork waits for all that was enqueued before it, so a tensor of the branch may be dropped once its last use is
    enqueued, on either stream.

    Args:
        device: of the work.
    """

    def __init__(self, device: torch.device) -> None:
        self.enabled = device.type == "cuda"
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._open = False

    @contextmanager
    def fork(self, rows: int) -> Generator[None]:
        """What is enqueued in here may run beside what follows, until `join`."""
        if not self.enabled or rows > ASIDE_ROWS:
            yield
            return
        self.join()  # a step that failed left its branch open
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._open = True
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """What is enqueued from now on waits for the branch, if there is one."""
        if self._open and self._stream is not None:
            self._open = False
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
