"""Where captured steps find their inputs: one piece of memory for all of them, since they follow each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from deepinfer_offline.models.base import CacheGroup
from deepinfer_offline.ops.transfers import SideUpload, StreamMark

FIELDS = ("query_starts", "seq_lens", "slots", "floors", "write_floors", "logit_rows", "targets")
"""What a step with prompts brings of each row; a decode step brings less."""
_ALIGN = 4  # int32 elements; what kernels assume of an address is 16 bytes


def aligned(size: int) -> int:
    """Elements of int32, so that what comes behind them is aligned."""
    return -(-size // _ALIGN) * _ALIGN


def table_columns(group: CacheGroup, limit: int) -> int:
    """Columns of a group's block table that hold sequences of `limit` positions."""
    return 1 if group.kind == "state" else -(-limit // group.block_size)


class StepMemory:
    """Inputs of captured steps of every size, int32 on the device.

    Decode steps take two pieces in turn: the inputs of a step are brought beside the step before, which reads the other one.
    A group's table begins at the same place in every step: what a longer one left behind it are blocks of that group.

    Args:
        groups: of the model's cache.
        decodes: most rows of a decode step.
        rows: most rows of a step with prompts; 0 where none is captured.
        limit: most positions of a sequence.
        device: of the model.

    Attributes:
        packed: what one copy brings for a step with prompts.
        pair: what one copy brings for a decode step, [2, any].
        turn: [2], which of the two the next decode step reads, and 0.
        tables: all block tables, where steps read them.
        starts: where each group's begins.
    """

    def __init__(self, groups: Sequence[CacheGroup], decodes: int, rows: int, limit: int, device: str) -> None:
        self.limit, self.groups = limit, tuple(groups)
        packed, pair, tables = _sizes(groups, decodes, rows, limit)
        self.packed = torch.zeros(packed, dtype=torch.int32, device=device)
        self.pair = torch.zeros(2, pair, dtype=torch.int32, device=device)
        self.turn = torch.zeros(2, dtype=torch.int32, device=device)
        self.tables = torch.zeros(sum(tables), dtype=torch.int32, device=device)
        self.starts = [sum(tables[:place]) for place in range(len(tables))]
        self._side = SideUpload(device)
        self._read: list[StreamMark | None] = [None, None]  # behind what used each of the two last
        self._next = 0  # what `turn` says once all that is enqueued is done

    @staticmethod
    def num_bytes(groups: Sequence[CacheGroup], decodes: int, rows: int, limit: int) -> int:
        """What such a memory takes."""
        packed, pair, tables = _sizes(groups, decodes, rows, limit)
        return torch.int32.itemsize * (packed + 2 * pair + 2 + sum(tables))

    def restart(self) -> None:
        """Make the next decode steps ones that pad all their rows, whatever was brought before and whichever steps ran."""
        self.turn.zero_()
        self.pair[:, : 1 + len(self.groups)].zero_()
        self._read[:] = [StreamMark(self.pair.device)] * 2
        self._next = 0

    def bring(self, arrays: Sequence[np.ndarray]) -> None:
        """Bring a decode step's inputs; it must be the next to read them."""
        self._side.upload_into(self.pair[self._next], arrays, after=self._read[self._next])

    def read(self) -> None:
        """The step that reads them is enqueued."""
        self._read[self._next] = StreamMark(self.pair.device)
        self._next = 1 - self._next

    def layout(self, limit: int) -> torch.Tensor:
        """int32 [groups, 2] of steps of at most `limit` positions: where each table begins, and its columns."""
        pairs = [(start, table_columns(g, limit)) for start, g in zip(self.starts, self.groups, strict=True)]
        return torch.tensor(pairs, dtype=torch.int32, device=self.packed.device)

    def views(self, rows: int, limit: int) -> dict[str, torch.Tensor]:
        """By group, the table [rows, columns] of a step of so many rows of at most `limit` positions."""
        found = {}
        for start, group in zip(self.starts, self.groups, strict=True):
            columns = table_columns(group, limit)
            found[group.name] = self.tables[start : start + rows * columns].view(rows, columns)
        return found


def _sizes(groups: Sequence[CacheGroup], decodes: int, rows: int, limit: int) -> tuple[int, int, list[int]]:
    """Elements of what is brought for a step with prompts, for a decode step, and of each table."""
    columns = [table_columns(group, limit) for group in groups]
    fields = (len(FIELDS) + 1) * aligned(rows + 1) + aligned(len(groups))
    pair = aligned(1 + len(groups) + decodes * (4 + sum(columns)))
    packed = fields + rows * sum(columns) if rows else 0
    return packed, pair, [aligned(max(decodes, rows) * count) for count in columns]
