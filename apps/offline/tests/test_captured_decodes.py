"""Which decode steps are captured, and when; with stand-ins for the model and for captures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from deepinfer_offline.engine.native.capture import ShortOfMemoryError
from deepinfer_offline.engine.native.graphs import DecodeGraphs


class Captured:
    """A model whose decode steps of up to `limit` positions in all are captured, for 30 in a row."""

    def __init__(self, limit: int) -> None:
        self.options: Any = SimpleNamespace(max_running=4)
        self._limit = limit

    def capture_limit(self, rows: int, longest: int) -> int | None:
        limit = max(30, longest)
        return limit if rows * limit <= self._limit else None


class Decodes(DecodeGraphs):
    """Captures of `lacking` tries find no memory for the step itself."""

    def __init__(self, limit: int, lacking: int = 0) -> None:
        super().__init__(cast("Any", Captured(limit)), None, cast("Any", None), cast("Any", None), cast("Any", None))
        self.lacking, self.tries = lacking, list[tuple[int, int]]()

    def _capture(self, size: int, limit: int) -> Any:
        self.tries.append((size, limit))
        if len(self.tries) <= self.lacking:
            raise ShortOfMemoryError("none is left")
        return SimpleNamespace(
            buffers=SimpleNamespace(fill=lambda _inputs: None),
            graph=SimpleNamespace(replay=lambda: None),
            logits=torch.zeros(size, 3),
            likeliest=torch.zeros(size),
        )

    def decode(self, *lengths: int) -> bool:
        """Whether a step of rows of these lengths was replayed."""
        rows, none = len(lengths), np.zeros(len(lengths), bool)
        host = SimpleNamespace(
            num_rows=rows, num_decodes=rows, logit_rows=none, prefills=none, keep_all=none, seq_lens=np.array(lengths)
        )
        inputs: Any = SimpleNamespace(host=host, samples=SimpleNamespace(slots=np.arange(rows)))
        found = self.run(inputs)
        return found is not None and found.logits is not None and len(found.logits) == rows


def test_a_step_that_the_device_was_short_of_memory_for_is_captured_later(caplog: pytest.LogCaptureFixture) -> None:
    """It runs without a graph meanwhile; the second, fourth and eighth time that it occurs are tries."""
    decodes = Decodes(120, lacking=3)
    assert [decodes.decode(9, 30, 5) for _ in range(9)] == [False] * 7 + [True] * 2
    assert decodes.tries == [(4, 30)] * 4
    assert [record.getMessage() for record in caplog.records] == [
        "a decode step of 4 rows is not captured yet and takes longer: none is left"
    ] * 3
    assert decodes.decode(30, 1), "another step is nobody's fault"


def test_steps_that_there_is_no_room_for_are_not_captured_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    decodes = Decodes(120)
    assert [decodes.decode(*lengths) for lengths in ((9, 31, 5), (120,), (121,), (30, 30, 30), (40, 40, 40))] == [
        False, True, False, True, False
    ]  # fmt: skip
    assert decodes.tries == [(1, 120), (4, 30)], "rows count as padded ones"
    (record,) = caplog.records
    assert "as large as 3 rows of up to 31 positions are not captured" in record.getMessage()
