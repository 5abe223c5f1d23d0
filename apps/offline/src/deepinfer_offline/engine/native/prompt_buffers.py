"""Inputs of a captured step with prompts: one copy brings what belongs to rows; what belongs to tokens is derived from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from deepinfer_offline.engine.native.batch import StepInputs
from deepinfer_offline.engine.native.ragged import bounds, ragged_batch
from deepinfer_offline.engine.native.step_memory import StepMemory, padded
from deepinfer_offline.engine.native.tokens import TokenBuffer
from deepinfer_offline.models.base import ForwardBatch, HostBatch


@dataclass(frozen=True, slots=True, order=True)
class PromptBucket:
    """Most tokens of a step, and most rows: of one token, and others."""

    tokens: int
    decodes: int
    prompts: int

    @property
    def rows(self) -> int:
        return self.decodes + self.prompts


@dataclass(frozen=True, slots=True)
class PromptBuffers:
    """The part of the memory that one bucket uses. Rows of one token come first, padded with empty ones, then the others.

    Attributes:
        bucket: what fits.
        memory: where it lies.
        fields: see `StepMemory.fields`.
        layout: int32 [groups, 2], where each table begins and its columns.
        tables: by cache group, [rows, columns].
    """

    bucket: PromptBucket
    memory: StepMemory
    fields: Mapping[str, torch.Tensor]
    layout: torch.Tensor
    tables: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, memory: StepMemory, bucket: PromptBucket) -> PromptBuffers:
        """Views of the memory."""
        rows, limit = bucket.rows, memory.limit
        return cls(bucket, memory, memory.fields(rows), memory.layout(limit), memory.views(rows, limit))

    def fill(self, inputs: StepInputs, tokens: TokenBuffer) -> None:
        """Bring a step's inputs; the next call of `batch`, or a replay of it, reads them."""
        host, samples, rows = inputs.host, inputs.samples, self.bucket.rows
        by_row = (host.seq_lens, host.slots, host.floors, host.write_floors)
        tables = [self._spread(host.block_tables[group.name], host.num_decodes) for group in self.memory.groups]
        columns = [
            self._starts(host),
            *(self._spread(values, host.num_decodes) for values in by_row),
            padded(host.logit_rows, rows, 0),
            padded(tokens.flat_index(samples.slots, samples.positions), rows, tokens.scratch),
            np.array([table.shape[1] for table in tables], np.int32),
        ]
        self.memory.bring(columns, tables)

    def batch(self, tokens: TokenBuffer) -> ForwardBatch:
        """The step. Its tokens past the last row are position 0 of nobody."""
        f, b = self.fields, self.bucket
        starts = np.concatenate([np.arange(b.decodes + 1), np.full(b.prompts, b.tokens)])
        host = bounds(starts, self.memory.limit, draws=b.rows, decodes=b.decodes, prompts=b.prompts)
        return ragged_batch(
            self.memory, f, self.tables, self.layout, tokens, host,
            size=b.tokens, starts=f["query_starts"], seq_lens=f["seq_lens"], logit_rows=f["logit_rows"].long(),
        )  # fmt: skip

    def _spread(self, values: np.ndarray, decodes: int) -> np.ndarray:
        """[R, ...] -> [rows, ...]: the others behind the padded rows of one token."""
        found = np.zeros((self.bucket.rows, *values.shape[1:]), np.int32)
        found[:decodes] = values[:decodes]
        found[self.bucket.decodes : self.bucket.decodes + len(values) - decodes] = values[decodes:]
        return found

    def _starts(self, host: HostBatch) -> np.ndarray:
        """int32 [rows + 1], where rows begin; those that pad are empty."""
        starts, decodes, first = host.query_starts, host.num_decodes, self.bucket.decodes
        found = np.full(self.bucket.rows + 1, starts[-1], np.int32)
        found[: decodes + 1] = starts[: decodes + 1]
        found[decodes:first] = starts[decodes]
        found[first : first + len(starts) - decodes] = starts[decodes:]
        return found
