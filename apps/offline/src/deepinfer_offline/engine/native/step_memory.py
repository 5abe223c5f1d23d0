"""Where captured steps find their inputs: one piece of memory for all of them, since they follow each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from deepinfer_offline.models.base import CacheGroup
from deepinfer_offline.ops.transfers import upload_into

FIELDS = ("query_starts", "seq_lens", "slots", "floors", "write_floors", "logit_rows", "targets")
"""What a step with prompts or drafts brings of each row; a decode step brings less."""
_OTHERS = 64  # elements beside rows and tables: a budget, and what calibrates the confidences of a block
_DRAWING = 160  # elements of a row that draws: what it asks for, and random numbers of the positions at which it may
_ALIGN = 4  # int32 elements; what kernels assume of an address is 16 bytes


def aligned(size: int) -> int:
    """Elements of int32, so that what comes behind them is aligned."""
    return -(-size // _ALIGN) * _ALIGN


def padded(values: np.ndarray, size: int, filler: int) -> np.ndarray:
    """int32 [size, ...]: values [n, ...], and the filler behind them."""
    found = np.full((size, *values.shape[1:]), filler, np.int32)
    found[: len(values)] = values
    return found


def table_columns(group: CacheGroup, limit: int) -> int:
    """Columns of a group's block table that hold sequences of `limit` positions."""
    return 1 if group.kind == "state" else -(-limit // group.block_size)


class StepMemory:
    """Inputs of captured steps of every size, int32 on the device.

    A group's table begins at the same place in every step: what a longer one left behind it are blocks of that group.

    Args:
        groups: of the model's cache.
        rows: most of a step.
        limit: most positions of a sequence.
        device: of the model.

    Attributes:
        packed: what one copy brings.
        tables: all block tables, where steps read them.
        starts: where each group's begins.
    """

    def __init__(self, groups: Sequence[CacheGroup], rows: int, limit: int, device: str) -> None:
        self.rows, self.limit, self.groups = rows, limit, tuple(groups)
        packed, tables = _sizes(groups, rows, limit)
        self.packed = torch.zeros(packed, dtype=torch.int32, device=device)
        self.tables = torch.zeros(sum(tables), dtype=torch.int32, device=device)
        self.starts = [sum(tables[:place]) for place in range(len(tables))]

    @staticmethod
    def num_bytes(groups: Sequence[CacheGroup], rows: int, limit: int) -> int:
        """What such a memory takes."""
        packed, tables = _sizes(groups, rows, limit)
        return torch.int32.itemsize * (packed + sum(tables))

    def fields(self, rows: int) -> dict[str, torch.Tensor]:
        """Parts of `packed` that bring so many ragged rows, by name and in their order, each aligned: `query_starts` [rows + 1],
        others [rows], `widths` [groups], columns of the tables that are given, and `given`, those tables.
        """
        sizes = {name: rows + (name == "query_starts") for name in FIELDS} | {"widths": len(self.groups)}
        at, found = 0, {}
        for name, size in sizes.items():
            found[name] = self.packed[at : at + size]
            at += aligned(size)
        return found | {"given": self.packed[at:]}

    def bring(self, columns: Sequence[np.ndarray], tables: Sequence[np.ndarray]) -> None:
        """Copy a step's fields, in their order and each made as long as is aligned, and its tables behind them."""
        upload_into(self.packed, [*(padded(column, aligned(len(column)), 0) for column in columns), *tables])

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


def _sizes(groups: Sequence[CacheGroup], rows: int, limit: int) -> tuple[int, list[int]]:
    """Elements of what is brought, and of each table."""
    columns = [table_columns(group, limit) for group in groups]
    fields = (len(FIELDS) + 1) * aligned(rows + 1) + _OTHERS + _DRAWING * rows + aligned(len(groups))
    return fields + rows * sum(columns), [aligned(rows * count) for count in columns]
