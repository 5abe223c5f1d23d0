"""Captured drafts: one CUDA graph for each bucket of rows and context, behind a captured step whose block tables it reads.

The parallel stage is captured. The sequential one, which draws as each row asks, runs after it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepinfer_offline.engine.native.capture import Recorder
from deepinfer_offline.engine.native.repeated import Repeated
from deepinfer_offline.engine.native.step_memory import StepMemory
from deepinfer_offline.engine.native.tokens import TokenBuffer
from deepinfer_offline.models.base import CapturesBlocks, DraftChooser, DraftedBlocks

_LEAST = 256  # positions of the smallest bucket
_MOST = 64  # graphs


@dataclass(frozen=True, slots=True, order=True)
class DraftBucket:
    """Rows, and positions up to the longest row's anchor."""

    rows: int
    longest: int


@dataclass(frozen=True, slots=True)
class DraftBuffers:
    """Inputs of a bucket.

    Attributes:
        bucket: what fits.
        table: int32 [rows, columns], where the step before found it.
        places: int64 [rows], where each block begins in the flat token buffer, behind its anchor.
        positions: int64 [rows], of the anchors. Of rows that pad both are what other steps left: nothing is written there.
    """

    bucket: DraftBucket
    table: torch.Tensor
    places: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def of(cls, table: torch.Tensor, bucket: DraftBucket) -> DraftBuffers:
        """Buffers over a table."""
        places, positions = table.new_zeros(2, bucket.rows, dtype=torch.int64)
        return cls(bucket, table, places, positions)

    def fill(self, base: torch.Tensor, lengths: torch.Tensor) -> None:
        """Rows whose slots begin at `base` in the token buffer and have `lengths` tokens, int64 [R] both."""
        torch.add(base, lengths, out=self.places[: len(base)])
        torch.sub(lengths, 1, out=self.positions[: len(base)])


def context_bucket(longest: int, limit: int) -> int:
    """Positions that a captured draft reads for rows of at most `longest`, where sequences end at `limit`."""
    return min(max(_LEAST, 1 << (longest - 1).bit_length()), limit)


class DraftGraphs:
    """Captures drafts when a bucket occurs again, and replays them. Used by the thread that runs the steps.

    Args:
        model: drafts without a decision from the host.
        cache: of the model.
        tokens: the token buffer.
        recorder: records graphs.
        memory: where captured steps have their block tables.
        rows: sizes of batches, ascending; the last one holds all that run at once.
    """

    def __init__(
        self,
        model: CapturesBlocks,
        cache: Any,
        tokens: TokenBuffer,
        recorder: Recorder,
        memory: StepMemory,
        rows: Sequence[int],
    ) -> None:
        self._model, self._cache, self._tokens, self._rows = model, cache, tokens, rows
        self._limit, group = memory.limit, model.draft_group

        def make(bucket: DraftBucket) -> DraftBuffers:
            return DraftBuffers.of(memory.views(bucket.rows, memory.limit)[group], bucket)

        self._repeated = Repeated(recorder, make, self._work, _MOST)

    @property
    def tries(self) -> int:
        """Captures so far, those that found no memory among them."""
        return self._repeated.tries

    @property
    def firsts(self) -> int:
        """See `Repeated.firsts`."""
        return self._repeated.firsts

    @property
    def captured(self) -> list[DraftBucket]:
        """What is captured."""
        return sorted(self._repeated.captured)

    def run(self, base: torch.Tensor, lengths: torch.Tensor, longest: int, choose: DraftChooser) -> DraftedBlocks:
        """Draft for the rows of the captured step before, which are those of its block tables.

        Args:
            base: int64 [R], where each row's slot begins in the flat token buffer.
            lengths: int64 [R], its tokens.
            longest: upper bound of the anchors' positions, known on the host.
            choose: draws tokens, and puts them into the token buffer.
        """
        count = len(base)
        bucket = DraftBucket(self._rows[bisect_left(self._rows, count)], context_bucket(longest, self._limit))
        buffers = self._repeated.buffers(bucket)
        buffers.fill(base, lengths)
        hidden, anchors = (part[:count] for part in self._repeated.run(bucket))
        return self._model.finish_blocks(hidden, anchors, choose)

    def _work(self, buffers: DraftBuffers) -> tuple[torch.Tensor, ...]:
        """What is captured."""
        anchors, table = self._tokens.gather((buffers.places - 1).clamp_min(0)), buffers.table.long()
        longest = buffers.bucket.longest
        return self._model.draft_states(anchors, buffers.positions, table, self._cache, longest), anchors
