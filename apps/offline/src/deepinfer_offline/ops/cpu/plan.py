"""The attention plan of one step, laid out for the C kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from deepinfer_offline.models.base import ForwardBatch
from deepinfer_offline.ops.attention.base import GROUP, AttentionShape
from deepinfer_offline.ops.attention.items import AttentionItems, make_items

MAX_ROWS = 48
"""Query rows (tokens x heads of a group) of one item; `MAX_ROWS` in kernels.c."""
_DIMS = (64, 128)
_BLOCK = 32  # the kernels read keys in runs of 32
_SPLIT_KEYS = 512  # an item with more keys is split when there are too few items to keep every thread busy
_BUSY_UNITS = 16

_INTS = ("positions", "order", "item_tokens", "item_limits", "item_offsets", "item_rows", "item_begins", "item_ends")
_MORE_INTS = ("item_parts", "table")
_MERGES = ("merge_tokens", "merge_offsets", "merge_parts")


def shape_reason(shape: AttentionShape) -> str | None:
    """Why the kernels do not serve a shape, or None."""
    if shape.head_dim not in _DIMS:
        return f"head_dim {shape.head_dim} is not one of {', '.join(map(str, _DIMS))}"
    if shape.block_size % _BLOCK:
        return f"block_size {shape.block_size} is not a multiple of {_BLOCK}"
    if shape.group_size > MAX_ROWS:
        return f"{shape.group_size} query heads share a key head; at most {MAX_ROWS} may"
    return None


class Plan(ctypes.Structure):
    """`Plan` of kernels.c, field by field; the meanings are documented there."""

    _fields_ = (
        ("tokens", ctypes.c_int64),
        ("heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("dim", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("rope", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("units", ctypes.c_int32),
        ("columns", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in _INTS[1:]),
        *((name, ctypes.c_void_p) for name in _MORE_INTS),
        ("merges", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in _MERGES),
        ("query", ctypes.c_void_p),
        ("partial", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class PlanArrays:
    """The arrays behind a `Plan`, kept alive with it, and the rows of `partial` that it needs."""

    arrays: Mapping[str, np.ndarray]
    partial_rows: int

    def fill(self, plan: Plan) -> None:
        """Point the plan at the arrays."""
        for name, array in self.arrays.items():
            setattr(plan, name, array.ctypes.data)


def plan_arrays(batch: ForwardBatch, shape: AttentionShape) -> PlanArrays:
    """Lay out a batch's attention."""
    host, size = batch.host, shape.block_size
    table = np.ascontiguousarray(host.block_tables[GROUP], np.int32)
    rows = np.repeat(np.arange(host.num_rows), host.counts)
    positions = np.arange(len(rows)) - host.query_starts[rows] + (host.seq_lens - host.counts)[rows]
    slots = table[rows, positions // size].astype(np.int64) * size + positions % size
    slots[positions < host.write_floors[rows]] = -1
    items = make_items(host, batch.cascades, max(1, MAX_ROWS // shape.group_size))
    items = _split_long(items, shape)
    parts = np.bincount(items.tokens, minlength=len(rows))
    item_parts, partial_rows = _place_parts(items, parts)
    cost = items.sizes.astype(np.int64) * (items.key_ends - items.key_begins)
    units = np.argsort(-cost, kind="stable")[:, None] * shape.num_kv_heads + np.arange(shape.num_kv_heads)
    ints = {
        "positions": positions,
        "order": units.ravel(),
        "item_tokens": items.tokens,
        "item_limits": np.minimum(positions[items.tokens] + 1, np.repeat(items.key_ends, items.sizes)),
        "item_offsets": items.offsets,
        "item_rows": items.table_rows,
        "item_begins": items.key_begins,
        "item_ends": items.key_ends,
        "item_parts": item_parts,
        "table": table,
        **_merges(items, item_parts),
    }
    arrays = {name: np.ascontiguousarray(array, np.int32) for name, array in ints.items()}
    return PlanArrays({**arrays, "slots": slots}, partial_rows)


def _split_long(items: AttentionItems, shape: AttentionShape) -> AttentionItems:
    """Split the keys of long items when there are few, as in decoding a long context alone."""
    lengths = items.key_ends - items.key_begins
    pieces = -(-lengths // _SPLIT_KEYS)
    if len(lengths) * shape.num_kv_heads >= _BUSY_UNITS or int(pieces.max(initial=1)) == 1 or items.sizes.max() > 1:
        return items
    source = np.repeat(np.arange(len(lengths)), pieces)
    place = np.arange(len(source)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    begins = items.key_begins[source] + place * _SPLIT_KEYS
    ends = np.minimum(begins + _SPLIT_KEYS, items.key_ends[source])
    offsets = np.arange(len(source) + 1, dtype=np.int32)
    return AttentionItems(items.tokens[source], offsets, items.table_rows[source], begins, ends, len(source))


def _place_parts(items: AttentionItems, parts: np.ndarray) -> tuple[np.ndarray, int]:
    """First partial row of each item that holds a token with several parts; -1 for the others."""
    several = np.maximum.reduceat(parts[items.tokens], items.offsets[:-1]) > 1
    sizes = np.where(several, items.sizes, 0)
    first = np.cumsum(sizes) - sizes
    return np.where(several, first, -1), int(sizes.sum())


def _merges(items: AttentionItems, item_parts: np.ndarray) -> dict[str, np.ndarray]:
    """Tokens of items that write parts, and the partial rows of each."""
    written = np.repeat(item_parts >= 0, items.sizes)
    tokens = items.tokens[written]
    order = np.argsort(tokens, kind="stable")  # partial rows are numbered in the order of `tokens`
    found, counts = np.unique(tokens, return_counts=True)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return {"merge_tokens": found, "merge_offsets": offsets, "merge_parts": order}
