"""The token rows of one step, as the layers see them: positions, owners, floors, and where their cache entries go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from deepinfer_offline.models.deepsig_v41.cache import GLOBAL, PAIRS, WINDOW, entries_per_block

if TYPE_CHECKING:
    from deepinfer_offline.models.base import ForwardBatch


def _numbers(starts: np.ndarray) -> np.ndarray:
    """Row number of each token of a ragged batch: [0, 2, 5] -> [0, 0, 1, 1, 1]."""
    return np.repeat(np.arange(len(starts) - 1), np.diff(starts))


@dataclass(frozen=True)
class StepRows:
    """T token rows of R sequences, sequence after sequence, positions ascending. Host facts are numpy, the rest tensors.

    Attributes:
        query_starts: int64 [R + 1], first row of each sequence.
        first: int64 [R], position of each sequence's first row here.
        ends: int64 [R], one past each sequence's last position.
        floors: int64 [R], lowest position that window attention may read.
        write_floors: int64 [R], see `HostBatch`.
        slots: int64 [R].
        host_positions: int64 [T].
        owner: int64 [T], sequence of each row, host.
        positions: int64 [T].
        owners: int64 [T].
        tables: block tables by group, int64 [R, columns].
        block_size: tokens of a block, in every paged group.
    """

    query_starts: np.ndarray
    first: np.ndarray
    ends: np.ndarray
    floors: np.ndarray
    write_floors: np.ndarray
    slots: np.ndarray
    host_positions: np.ndarray
    owner: np.ndarray
    positions: Tensor
    owners: Tensor
    tables: dict[str, Tensor]
    block_size: int

    @classmethod
    def of(cls, batch: ForwardBatch, block_size: int) -> StepRows:
        host = batch.host
        starts = host.query_starts.astype(np.int64)
        owner = _numbers(starts)
        ends = host.seq_lens.astype(np.int64)
        first = ends - np.diff(starts)
        positions = np.arange(starts[-1]) - starts[owner] + first[owner]
        device = batch.positions.device
        return cls(
            query_starts=starts,
            first=first,
            ends=ends,
            # A decode row's window never reaches below the replay start, so only prefill rows carry a floor.
            floors=np.where(host.prefills, host.floors, 0).astype(np.int64),
            write_floors=host.write_floors.astype(np.int64),
            slots=host.slots.astype(np.int64),
            host_positions=positions,
            owner=owner,
            positions=batch.positions.to(torch.int64),
            owners=torch.from_numpy(owner).to(device),
            tables={name: table.to(torch.int64) for name, table in batch.block_tables.items()},
            block_size=block_size,
        )

    @property
    def count(self) -> int:
        return len(self.host_positions)

    def tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.positions.device)

    def window_slots(self, owners: Tensor, positions: Tensor) -> Tensor:
        """Slots of `positions` of sequences `owners` (same shape) in a window pool. Positions must be covered."""
        block = self.tables[WINDOW][owners, positions // self.block_size]
        return block * self.block_size + positions % self.block_size

    def entry_slots(self, owners: Tensor, last: Tensor, ratio: int) -> Tensor:
        """Slots of the compressed entries whose last tokens are at positions `last`."""
        block = self.tables[GLOBAL][owners, last // self.block_size]
        return block * entries_per_block(self.block_size, ratio) + last % self.block_size // ratio

    def ring_blocks(self) -> Tensor:
        """int64 [R], each sequence's block in the ring pools."""
        return self.tables[PAIRS][:, 0]

    def keep(self, kept: np.ndarray, floors: np.ndarray) -> StepRows:
        """The rows `kept` (ascending; each sequence keeps its last rows) with new window floors [R]."""
        owner = self.owner[kept]
        counts = np.bincount(owner, minlength=len(self.first))
        starts = np.concatenate(([0], np.cumsum(counts)))
        index = self.tensor(kept)
        return StepRows(
            query_starts=starts,
            first=self.ends - counts,
            ends=self.ends,
            floors=floors,
            write_floors=self.write_floors,
            slots=self.slots,
            host_positions=self.host_positions[kept],
            owner=owner,
            positions=self.positions[index],
            owners=self.owners[index],
            tables=self.tables,
            block_size=self.block_size,
        )
