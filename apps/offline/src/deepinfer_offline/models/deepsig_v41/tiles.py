"""Attention work of one step: rows of one sequence side by side, with the window slots and masks that they share.

Decode rows are tiles of one row. Prompt rows are cut into tiles, so that one matrix product serves many queries. All tiles of a
set have the same height; rows that pad a tile repeat its last row and their results are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepinfer_offline.models.deepsig_v41.rows import StepRows

_SHORT = 8  # rows of a verification step at most; longer sequences count as prompt chunks


@dataclass(frozen=True)
class TileSet:
    """b tiles of m rows each.

    Attributes:
        rows: int64 [b, m], rows of the step.
        valid: bool [b, m], False for padding.
        sequences: int64 [n], the sequences that occur, ascending.
        owner: int64 [b], index of each tile's sequence in `sequences`.
        positions: int64 [b, m].
        window_slots: int64 [b, m + W], slots of the positions from W - 1 before the tile to its end, -1 where no row may read;
            the last column is -1: the key that carries the sink.
        window_allowed: bool [b, m, m + W]; the last column is True.
        window_full: every entry of `window_allowed` is True.
        longest: tokens of the longest of the sequences.
        whole: the rows are all rows of the step in order, with m = 1.
        memo: keys gathered from the cache, shared by the layers that read the same ones.
    """

    rows: Tensor
    valid: Tensor
    sequences: Tensor
    owner: Tensor
    positions: Tensor
    window_slots: Tensor
    window_allowed: Tensor
    window_full: bool
    longest: int
    whole: bool
    memo: dict[Any, Tensor] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.shape[0], self.rows.shape[1]

    @property
    def single(self) -> bool:
        """Whether every tile is one row of a sequence of its own, in order: tile i belongs to sequence i."""
        return self.rows.shape[1] == 1 and len(self.sequences) == len(self.rows)

    def take(self, values: Tensor) -> Tensor:
        """Rows of `values` [T, ...] by tile: [b, m, ...]."""
        return values.unsqueeze(1) if self.whole else values[self.rows]

    def put(self, out: Tensor, values: Tensor) -> None:
        """Write `values` [b, m, ...] to their rows of `out` [T, ...]."""
        if self.whole:
            out.copy_(values.squeeze(1))
        else:
            out[self.rows[self.valid]] = values[self.valid]

    def visible(self, ratio: int) -> Tensor:
        """int64 [b, m], compressed entries of `ratio` that each query may see."""
        return torch.div(self.positions + 1, ratio, rounding_mode="floor")

    def entries(self, ratio: int) -> int:
        """Entries of the longest sequence."""
        return self.longest // ratio

    def entry_slots(self, step: StepRows, ratio: int) -> Tensor:
        """int64 [n, entries], slots of every sequence's compressed entries, -1 past its end."""
        key = ("slots", ratio)
        if key not in self.memo:
            last = torch.arange(self.entries(ratio), device=self.rows.device) * ratio + (ratio - 1)
            ends = step.tensor(step.ends)[self.sequences].unsqueeze(1)
            present = last < ends
            owners = self.sequences.unsqueeze(1).expand_as(present)
            slots = step.entry_slots(owners, torch.where(present, last, 0), ratio)
            self.memo[key] = slots.masked_fill(~present, -1)
        return self.memo[key]


def build_tiles(step: StepRows, window: int) -> list[TileSet]:
    """Cut the rows of a step into tile sets: single rows, short runs, prompt chunks."""
    counts = np.diff(step.query_starts)
    height = min(64, max(16, window // 2))
    classes = (
        (np.flatnonzero(counts == 1), 1),
        (np.flatnonzero((counts > 1) & (counts <= _SHORT)), _SHORT),
        (np.flatnonzero(counts > _SHORT), height),
    )
    return [_tile_set(step, sequences, m, window) for sequences, m in classes if len(sequences)]


def _tile_set(step: StepRows, sequences: np.ndarray, height: int, window: int) -> TileSet:
    begin, end = step.query_starts[sequences], step.query_starts[sequences + 1]
    height = min(height, int((end - begin).max()))
    per_sequence = -(-(end - begin) // height)
    owner = np.repeat(np.arange(len(sequences)), per_sequence)
    ordinal = np.arange(len(owner)) - np.repeat(np.cumsum(per_sequence) - per_sequence, per_sequence)
    rows = (begin[owner] + ordinal * height)[:, None] + np.arange(height)
    valid = rows < end[owner][:, None]
    rows = np.minimum(rows, end[owner][:, None] - 1)
    positions = step.host_positions[rows]
    slots, allowed = _window(step, sequences[owner], positions, window)
    return TileSet(
        rows=step.tensor(rows),
        valid=step.tensor(valid),
        sequences=step.tensor(sequences),
        owner=step.tensor(owner),
        positions=step.tensor(positions),
        window_slots=slots,
        window_allowed=step.tensor(allowed),
        window_full=bool(allowed.all()),
        longest=int(step.ends[sequences].max()),
        whole=height == 1 and len(rows) == step.count,
    )


def _window(step: StepRows, owner: np.ndarray, positions: np.ndarray, window: int) -> tuple[Tensor, np.ndarray]:
    """Window slots [b, m + W] and who may read them [b, m, m + W], the sink's column last."""
    height = positions.shape[1]
    keys = positions[:, :1] + np.arange(1 - window, height)
    floors, last = step.floors[owner][:, None], positions[:, -1:]
    present = (keys >= np.maximum(floors, 0)) & (keys <= last)
    query, key = positions[:, :, None], keys[:, None, :]
    allowed = (key <= query) & (key > query - window) & present[:, None, :]
    owners = step.tensor(np.broadcast_to(owner[:, None], keys.shape))
    slots = step.window_slots(owners, step.tensor(np.where(present, keys, last)))
    slots = slots.masked_fill(~step.tensor(present), -1)
    b = len(owner)
    slots = torch.cat((slots, slots.new_full((b, 1), -1)), dim=1)
    sink = np.ones((b, height, 1), dtype=bool)
    return slots, np.concatenate((allowed, sink), axis=2)
