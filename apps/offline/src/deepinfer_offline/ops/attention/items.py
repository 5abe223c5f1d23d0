"""Work items of one step's attention: which query tokens read which range of whose keys."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deepinfer_offline.models.base import BatchCascade, HostBatch


@dataclass(frozen=True, slots=True)
class AttentionItems:
    """I items. The tokens of an item read the keys [key_begin, key_end) of one table row, each up to its own position.

    A token is in one item, or in two when it is in a cascade: its own part and the shared prefix.

    Attributes:
        tokens: int32 [sum of sizes], flattened token rows, item after item, ascending within an item.
        offsets: int32 [I + 1], where each item's tokens begin.
        table_rows: int32 [I], batch row whose block table is read.
        key_begins: int32 [I], a multiple of the block size.
        key_ends: int32 [I], past the last key that the item's last token reads.
        num_own: items [0, num_own) cover every token once; the others are shared prefixes.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    table_rows: np.ndarray
    key_begins: np.ndarray
    key_ends: np.ndarray
    num_own: int

    @property
    def sizes(self) -> np.ndarray:
        return self.offsets[1:] - self.offsets[:-1]


def make_items(host: HostBatch, cascades: tuple[BatchCascade, ...], tile: int) -> AttentionItems:
    """Cut a batch into items of at most `tile` tokens."""
    own = _own_items(host, cascades, tile)
    shared = _shared_items(host, cascades, tile)
    sizes = np.concatenate([own[1], shared[1]])
    offsets = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=offsets[1:])
    columns = (np.concatenate(pair).astype(np.int32) for pair in zip(own[2:], shared[2:], strict=True))
    return AttentionItems(np.concatenate([own[0], shared[0]]).astype(np.int32), offsets, *columns, num_own=len(own[1]))


_Columns = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # tokens, sizes, rows, begins, ends


def _own_items(host: HostBatch, cascades: tuple[BatchCascade, ...], tile: int) -> _Columns:
    counts = host.counts
    begins = np.zeros(host.num_rows, np.int32)
    for cascade in cascades:
        begins[cascade.rows] = cascade.tokens
    tiles = -(-counts // tile)
    rows = np.repeat(np.arange(host.num_rows), tiles)
    index = np.arange(len(rows)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    sizes = np.minimum(tile, counts[rows] - index * tile)
    ends = host.seq_lens[rows] - counts[rows] + index * tile + sizes
    return np.arange(int(counts.sum())), sizes, rows, begins[rows], ends


def _shared_items(host: HostBatch, cascades: tuple[BatchCascade, ...], tile: int) -> _Columns:
    tokens: list[np.ndarray] = []
    rows: list[int] = []
    ends: list[int] = []
    for cascade in cascades:
        flat = host.query_starts[cascade.rows]
        for start in range(0, len(flat), tile):
            tokens.append(flat[start : start + tile])
            rows.append(int(cascade.rows[0]))
            ends.append(cascade.tokens)
    sizes = np.array([len(part) for part in tokens], np.int64)
    flat_tokens = np.concatenate(tokens) if tokens else np.zeros(0, np.int64)
    return flat_tokens, sizes, np.array(rows, np.int64), np.zeros(len(rows), np.int64), np.array(ends, np.int64)
