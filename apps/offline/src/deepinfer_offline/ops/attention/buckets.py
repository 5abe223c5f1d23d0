"""Padding of attention items into few rectangular buckets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deepinfer_offline.ops.attention.items import AttentionItems

_MAX_AREA = 1 << 21  # queries x keys of one bucket: 4 MiB of bfloat16 mask for each query head of a group
_MAX_PADDING = 1.25  # padded area over real area from which a bucket is split


@dataclass(frozen=True, slots=True)
class Bucket:
    """B items, padded to Q queries and `columns` blocks.

    Attributes:
        tokens: int64 [B, Q], flattened token rows; padding repeats the item's last token.
        real: bool [B, Q], False for padding.
        blocks: int64 [B, columns]; padding repeats the item's last block.
        limits: int64 [B, Q], visible keys of each query, counted from the item's first key.
    """

    tokens: np.ndarray
    real: np.ndarray
    blocks: np.ndarray
    limits: np.ndarray


def make_buckets(
    items: AttentionItems, which: np.ndarray, positions: np.ndarray, table: np.ndarray, block_size: int
) -> list[Bucket]:
    """Group the items `which` (indices) by size, then pad each group.

    Args:
        items: all items of the step.
        which: int64 [n], the ones to group.
        positions: int64 [T], position of each token.
        table: int32 [R, columns], block table of the batch rows.
        block_size: positions of a block.
    """
    sizes = items.sizes[which].astype(np.int64)
    columns = -(-(items.key_ends[which] - items.key_begins[which]).astype(np.int64) // block_size)
    order = np.lexsort((columns, sizes))
    groups = _split(sizes[order], columns[order] * block_size)
    return [_pad(items, which[order[first:last]], positions, table, block_size) for first, last in groups]


def _split(queries: np.ndarray, keys: np.ndarray) -> list[tuple[int, int]]:
    """Ranges of a list sorted by (queries, keys) whose padded area stays close to the real one."""
    groups: list[tuple[int, int]] = []
    first, real, most_keys = 0, 0, 0
    for index in range(len(queries)):
        area = int(queries[index] * keys[index])
        wider = max(most_keys, int(keys[index]))
        padded = int(queries[index]) * wider * (index - first + 1)
        if index > first and (padded > _MAX_PADDING * (real + area) or padded > _MAX_AREA):
            groups.append((first, index))
            first, real, wider = index, 0, int(keys[index])
        real, most_keys = real + area, wider
    if len(queries):
        groups.append((first, len(queries)))
    return groups


def _pad(
    items: AttentionItems, chosen: np.ndarray, positions: np.ndarray, table: np.ndarray, block_size: int
) -> Bucket:
    sizes = items.sizes[chosen][:, None]
    place = np.arange(int(sizes.max()))
    real = place < sizes
    tokens = items.tokens[items.offsets[chosen][:, None] + np.minimum(place, sizes - 1)].astype(np.int64)
    begins, ends = items.key_begins[chosen][:, None], items.key_ends[chosen][:, None]
    first, last = begins // block_size, (ends - 1) // block_size
    column = np.arange(int((last - first).max()) + 1)
    blocks = table[items.table_rows[chosen][:, None], np.minimum(first + column, last)].astype(np.int64)
    limits = np.minimum(positions[tokens] + 1, ends) - begins
    return Bucket(tokens, real, blocks, limits)
