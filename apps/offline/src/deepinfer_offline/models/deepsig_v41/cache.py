"""What V4.1 caches between steps: three groups, their pools, and where an entry lies. `v41-model` section 3.

| group    | kind   | holds                                                                    |
|----------|--------|--------------------------------------------------------------------------|
| `global` | prefix | compressed KV and index keys of every KV source: what a prefix hit needs |
| `window` | window | window KV of every layer and draft stage                                 |
| `pairs`  | state  | the last rows of each source with a ratio above 1, whose group may be open |

Blocks are counted in tokens. An entry of ratio r belongs to the block of its last token, at offset
(position % block) // r, so any block size works, also one token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_offline.models.base import CacheGroup
from deepinfer_offline.models.deepsig_v41.config import V41Config
from deepinfer_offline.models.deepsig_v41.schedule import Schedule
from deepinfer_offline.ops.cpu.memory import cache_zeros
from deepinfer_offline.ops.deepsig import LAYOUT_VERSION, record_bytes

GLOBAL, WINDOW, PAIRS = "global", "window", "pairs"


def entries_per_block(block_size: int, ratio: int) -> int:
    """Entries of ratio `ratio` that a block of `block_size` tokens can hold."""
    return -(-block_size // ratio)


MAX_DRAFTS = 16  # drafts of one verification step, of whatever kind


def ring_rows(ratio: int) -> int:
    """Rows kept of a pair source: those of an open group, which rejected drafts must not overwrite."""
    return ratio + MAX_DRAFTS


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """Sizes of one model's cache, from its configuration alone."""

    config: V41Config
    schedule: Schedule
    block_size: int
    window_layers: int  # target layers and draft stages

    @classmethod
    def of(cls, config: V41Config, schedule: Schedule, block_size: int) -> CacheSpec:
        return cls(config, schedule, block_size, len(schedule.layers) + config.num_nextn_predict_layers)

    @property
    def entry_bytes(self) -> int:
        """Bytes of one compressed entry: its KV record and its index key."""
        return record_bytes("nvfp4", self.config.head_dim) + record_bytes("mxfp4", self.config.index_head_dim)

    @property
    def global_bytes_per_token(self) -> float:
        """Persistent bytes of one token; 890 at the released configuration."""
        return sum(self.entry_bytes / layer.ratio for layer in self.schedule.sources)

    @property
    def window_record(self) -> int:
        return record_bytes("fp8", self.config.head_dim)

    def groups(self) -> tuple[CacheGroup, ...]:
        """The declaration that the cache manager sizes pools by. `global` comes first where there is one."""
        groups = [
            CacheGroup(
                name=WINDOW,
                kind="window",
                block_size=self.block_size,
                bytes_per_block=self.block_size * self.window_record * self.window_layers,
                window=self.config.sliding_window,
                layers=len(self.schedule.layers),
            )
        ]
        if self.schedule.sources:
            per_block = sum(entries_per_block(self.block_size, s.ratio) for s in self.schedule.sources)
            groups.insert(0, CacheGroup(GLOBAL, "prefix", self.block_size, per_block * self.entry_bytes))
        if self.schedule.pair_sources:
            rows = sum(ring_rows(s.ratio) for s in self.schedule.pair_sources)
            multiple = math.lcm(*(s.ratio for s in self.schedule.pair_sources))
            row_bytes = 2 * self.config.head_dim * 4
            groups.append(CacheGroup(PAIRS, "state", 1, rows * row_bytes, hit_multiple=multiple))
        return tuple(groups)


@dataclass(frozen=True, slots=True)
class V41Cache:
    """The pools.

    Attributes:
        window: by layer, then by draft stage: uint8 [slots, window record].
        compressed: by source layer: uint8 [slots, compressed record].
        index_keys: by source layer: uint8 [slots, index record].
        rings: by pair source: float32 [blocks, rows, 2 * head_dim], value and gate of the last positions, row = position % rows.
        layout: version of the record layout; data of another version must not be read.
    """

    window: tuple[Tensor, ...]
    compressed: Mapping[int, Tensor]
    index_keys: Mapping[int, Tensor]
    rings: Mapping[int, Tensor]
    layout: int = LAYOUT_VERSION

    @property
    def nbytes(self) -> int:
        pools = (*self.window, *self.compressed.values(), *self.index_keys.values(), *self.rings.values())
        return sum(pool.numel() * pool.element_size() for pool in pools)


def allocate(spec: CacheSpec, num_blocks: Mapping[str, int], device: str) -> V41Cache:
    """Allocate the pools, `num_blocks` of each group."""
    c = spec.config
    window_slots = num_blocks[WINDOW] * spec.block_size

    def records(slots: int, width: int) -> Tensor:
        return cache_zeros((slots, width), torch.uint8, device)

    def global_pool(ratio: int, width: int) -> Tensor:
        return records(num_blocks[GLOBAL] * entries_per_block(spec.block_size, ratio), width)

    sources = spec.schedule.sources
    return V41Cache(
        window=tuple(records(window_slots, spec.window_record) for _ in range(spec.window_layers)),
        compressed={s.index: global_pool(s.ratio, record_bytes("nvfp4", c.head_dim)) for s in sources},
        index_keys={s.index: global_pool(s.ratio, record_bytes("mxfp4", c.index_head_dim)) for s in sources},
        rings={
            s.index: cache_zeros((num_blocks[PAIRS], ring_rows(s.ratio), 2 * c.head_dim), torch.float32, device)
            for s in spec.schedule.pair_sources
        },
    )


def block_views(spec: CacheSpec, cache: V41Cache) -> dict[str, tuple[Tensor, ...]]:
    """The pools of the groups that have blocks of tokens, uint8 [blocks, bytes of a block], by group.

    A source's compressed records come before its index keys, sources in the order of their layers.
    """

    def view(pool: Tensor, entries: int) -> Tensor:
        return pool.view(-1, entries * pool.shape[1])

    views = {WINDOW: tuple(view(pool, spec.block_size) for pool in cache.window)}
    if spec.schedule.sources:
        views[GLOBAL] = tuple(
            view(pools[s.index], entries_per_block(spec.block_size, s.ratio))
            for s in spec.schedule.sources
            for pools in (cache.compressed, cache.index_keys)
        )
    return views
