"""What the layers of one side (encoder or decoder) of a step share: rows, tiles, rotary tables, write slots."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepinfer_offline.models.deepsig_v41.compressor import EntryWrites, plan_writes
from deepinfer_offline.models.deepsig_v41.config import V41Config
from deepinfer_offline.models.deepsig_v41.rows import StepRows
from deepinfer_offline.models.deepsig_v41.selection import Selection
from deepinfer_offline.models.deepsig_v41.tiles import TileSet, build_tiles
from deepinfer_offline.ops import deepsig as ops


@dataclass(frozen=True)
class Frequencies:
    """Rotary frequencies, float32 [pairs]: of window-only layers and draft stages, and of layers with a ratio above 0."""

    plain: Tensor
    compressed: Tensor

    @classmethod
    def of(cls, config: V41Config, device: str) -> Frequencies:
        dim, scaling = config.qk_rope_head_dim, config.rope_scaling
        compressed = ops.rope_frequencies(
            dim,
            config.compress_rope_theta,
            factor=scaling.factor,
            original_length=scaling.original_length,
            beta_fast=scaling.beta_fast,
            beta_slow=scaling.beta_slow,
        )
        return cls(ops.rope_frequencies(dim, config.rope_theta).to(device), compressed.to(device))

    def table(self, positions: Tensor, ratio: int) -> ops.RotaryTable:
        return ops.rotary_table(positions, self.compressed if ratio else self.plain)


@dataclass
class Stage:
    """Rows that pass the same layers.

    Attributes:
        rows: the rows.
        tiles: of the rows.
        window_slots: int64 [T], where each row's window KV goes.
        selections: of the last index layer, one a tile set; None before the first.
    """

    rows: StepRows
    tiles: list[TileSet]
    window_slots: Tensor
    frequencies: Frequencies
    selections: list[Selection] | None = None
    _tables: dict[bool, ops.RotaryTable] = field(default_factory=dict)
    _writes: dict[tuple[int, int], EntryWrites] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: StepRows, config: V41Config, frequencies: Frequencies) -> Stage:
        slots = rows.window_slots(rows.owners, rows.positions)
        return cls(rows, build_tiles(rows, config.sliding_window), slots, frequencies)

    def rotary(self, ratio: int) -> ops.RotaryTable:
        """Rotation of the rows' positions in a layer of this ratio."""
        kind = ratio > 0
        if kind not in self._tables:
            self._tables[kind] = self.frequencies.table(self.rows.positions, ratio)
        return self._tables[kind]

    def writes(self, ratio: int, ring: int) -> EntryWrites:
        """The entries of this ratio that the rows complete."""
        if (ratio, ring) not in self._writes:
            self._writes[ratio, ring] = plan_writes(self.rows, ratio, ring)
        return self._writes[ratio, ring]


def one_hot_pre(count: int, streams: int, device: torch.device) -> Tensor:
    """The pre-mix before the first layer, float32 [count, streams]: all weight on stream 0."""
    pre = torch.zeros(count, streams, device=device)
    pre[:, 0] = 1
    return pre
