"""Inputs of a captured step that verifies drafts which no host knows: one copy brings what is known of its rows, and the
device puts their lengths right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from deepinfer_offline.engine.native.ahead_rows import DrawingRows
from deepinfer_offline.engine.native.batch import StepInputs
from deepinfer_offline.engine.native.ragged import bounds, ragged_batch
from deepinfer_offline.engine.native.step_memory import StepMemory, padded
from deepinfer_offline.engine.native.tokens import TokenBuffer
from deepinfer_offline.models.base import ForwardBatch


@dataclass(frozen=True, slots=True, order=True)
class AheadBucket:
    """Tokens of a step and its rows, each with those that pad, and most tokens of a row."""

    tokens: int
    rows: int
    width: int


@dataclass(frozen=True, slots=True)
class AheadBuffers:
    """The part of the memory that one bucket uses.

    Attributes:
        bucket: what fits.
        memory: where it lies.
        fields: see `StepMemory.fields`.
        layout: int32 [groups, 2], where each table begins and its columns.
        tables: by cache group, [rows, columns].
        numbers: int64 [tokens], 0, 1, ...
    """

    bucket: AheadBucket
    memory: StepMemory
    fields: Mapping[str, torch.Tensor]
    layout: torch.Tensor
    tables: Mapping[str, torch.Tensor]
    numbers: torch.Tensor

    @classmethod
    def of(cls, memory: StepMemory, bucket: AheadBucket) -> AheadBuffers:
        """Views of the memory."""
        numbers = torch.arange(bucket.tokens, device=memory.packed.device)
        layout, tables = memory.layout(memory.limit), memory.views(bucket.rows, memory.limit)
        return cls(bucket, memory, memory.fields(bucket.rows), layout, tables, numbers)

    def fill(self, inputs: StepInputs, rows: DrawingRows) -> None:
        """Bring a step of decode rows alone; the next call of `batch`, or a replay of it, reads them.

        A row that pads has position 0 of block 0, which nobody owns, or nothing: tokens that pad are the first such rows'.
        """
        host, size, count = inputs.host, self.bucket.rows, inputs.host.num_rows
        tables = [padded(host.block_tables[group.name], size, 0) for group in self.memory.groups]
        padding = np.arange(1, size - count + 1, dtype=np.int32)
        starts = [host.query_starts, np.minimum(host.query_starts[-1] + padding, self.bucket.tokens)]
        nothing = np.zeros(0, np.int32)
        columns = [
            np.concatenate(starts),
            padded(host.seq_lens, size, 1),
            *(padded(values, size, 0) for values in (host.slots, host.floors, host.write_floors)),
            *(padded(nothing, size, 0) for _ in ("logit_rows", "targets")),
            np.array([table.shape[1] for table in tables], np.int32),
        ]
        self.memory.bring(columns, tables)
        self.fields["query_starts"][:count].copy_(rows.begins)
        torch.add(rows.first, rows.verified, out=self.fields["seq_lens"][:count])

    def batch(self, tokens: TokenBuffer) -> ForwardBatch:
        """The step. Its tokens past the last row are position 0 of nobody."""
        f, b = self.fields, self.bucket
        starts, decodes = np.minimum(np.arange(b.rows + 1) * b.width, b.tokens), b.rows if b.width == 1 else 0
        host = bounds(starts, self.memory.limit, draws=b.tokens, decodes=decodes)
        return ragged_batch(
            self.memory, f, self.tables, self.layout, tokens, host,
            size=b.tokens, starts=f["query_starts"], seq_lens=f["seq_lens"], logit_rows=self.numbers,
        )  # fmt: skip
