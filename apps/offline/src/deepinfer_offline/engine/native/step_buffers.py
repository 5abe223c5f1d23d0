"""Inputs of a captured decode step: one copy brings them, and the step's first kernel puts them where the step reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from deepinfer_offline.engine.native.batch import StepInputs
from deepinfer_offline.engine.native.step_memory import StepMemory
from deepinfer_offline.engine.native.tokens import TokenBuffer
from deepinfer_offline.models.base import ForwardBatch, HostBatch
from deepinfer_offline.ops.cuda.support import kernels
from deepinfer_offline.ops.transfers import upload_into


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """Inputs of one bucket, int32 on the device, at addresses that stay.

    Attributes:
        rows: of the bucket.
        limit: most positions of a sequence.
        memory: where what a step copies lies, see `deepinfer_kernels_cuda.step_inputs`, and its tables.
        layout: [groups, 2], where each table begins and its columns.
        tables: by cache group, [rows, columns].
        zeros: [rows].
        query_starts: [rows + 1], 0, 1, ...
        logit_rows: int64 [rows], 0, 1, ...
    """

    rows: int
    limit: int
    memory: StepMemory
    layout: torch.Tensor
    tables: Mapping[str, torch.Tensor]
    zeros: torch.Tensor
    query_starts: torch.Tensor
    logit_rows: torch.Tensor

    @classmethod
    def of(cls, memory: StepMemory, rows: int, limit: int) -> StepBuffers:
        """Views of the memory."""
        device = memory.packed.device
        return cls(
            rows=rows,
            limit=limit,
            memory=memory,
            layout=memory.layout(limit),
            tables=memory.views(rows, limit),
            zeros=torch.zeros(rows, dtype=torch.int32, device=device),
            query_starts=torch.arange(rows + 1, dtype=torch.int32, device=device),
            logit_rows=torch.arange(rows, device=device),
        )

    def clear(self) -> None:
        """Make it a step that pads all its rows, whatever was brought before.

        Its tables are a column wide: a row that pads writes where its first entry says, and that is what another step left
        there unless it is brought.
        """
        head = self.memory.packed[: 1 + len(self.tables)]
        head.fill_(1)
        head[:1].zero_()

    def fill(self, inputs: StepInputs) -> None:
        """Bring a step's inputs; the next call of `batch`, or a replay of it, reads them."""
        host = inputs.host
        tables = [host.block_tables[name] for name in self.tables]
        head = np.array([host.num_rows, *(table.shape[1] for table in tables)], np.int32)
        places = inputs.token_index
        upload_into(self.memory.packed, [head, host.slots, host.seq_lens, places, places + 1, *tables])

    def batch(self, tokens: TokenBuffer) -> tuple[ForwardBatch, torch.Tensor]:
        """The step, and int32 [rows] places in the flat token buffer of what it draws."""
        unpacked = kernels().step_inputs(
            self.memory.packed, tokens.flat, self.memory.tables, self.layout, rows=self.rows, scratch=tokens.scratch
        )
        slots, seq_lens, target = unpacked.header
        batch = ForwardBatch(
            token_ids=unpacked.token_ids,
            positions=unpacked.positions,
            query_starts=self.query_starts,
            seq_lens=seq_lens,
            slots=slots,
            floors=self.zeros,
            write_floors=self.zeros,
            logit_rows=self.logit_rows,
            block_tables=self.tables,
            cascades=(),
            tokens=tokens.data,
            host=self._host(),
        )
        return batch, target

    def _host(self) -> HostBatch:
        """The host's side of a captured step: shapes and upper bounds, no tables."""
        size = self.rows
        return HostBatch(
            query_starts=np.arange(size + 1, dtype=np.int32),
            seq_lens=np.full(size, self.limit, np.int32),
            slots=np.zeros(size, np.int32),
            prefills=np.zeros(size, bool),
            floors=np.zeros(size, np.int32),
            write_floors=np.zeros(size, np.int32),
            keep_all=np.zeros(size, bool),
            logit_rows=np.arange(size, dtype=np.int64),
            block_tables={},
            num_decodes=size,
        )
