"""The smallest weight that top_k and top_p keep, found by counting instead of sorting: the CPU's way.

Non-negative floats order as their bits do. The upper 16 bits put every weight of a row in one of about 16,000 buckets;
counts and masses of the buckets say in which one the limit lies, and only that one is sorted.
"""

from __future__ import annotations

import numpy as np

_BUCKETS = (0x3F800000 >> 16) + 1  # the largest weight is 1.0
_CHUNK = 64  # rows whose buckets exist at once: 8 MiB each for counts and masses


def select_limits(weights: np.ndarray, top_k: np.ndarray, top_p: np.ndarray) -> np.ndarray:
    """Limits such that a row keeps the weights that are at least its limit.

    Args:
        weights: float32 [n, vocab] in 0..1, the largest of each row is 1.
        top_k: int64 [n], tokens to keep; 0 keeps all.
        top_p: float64 [n], share of the mass of what top_k keeps; 1 keeps all of it.

    Returns:
        float32 [n]. Ties with the last kept weight are kept.
    """
    limits = np.zeros(len(weights), np.float32)
    for start in range(0, len(weights), _CHUNK):
        part = slice(start, start + _CHUNK)
        limits[part] = _select_chunk(weights[part], top_k[part], top_p[part])
    return limits


def _select_chunk(weights: np.ndarray, top_k: np.ndarray, top_p: np.ndarray) -> np.ndarray:
    rows = len(weights)
    buckets = np.minimum(np.ascontiguousarray(weights).view(np.int32) >> 16, _BUCKETS - 1)
    index = (buckets + (np.arange(rows) * _BUCKETS)[:, None]).ravel()
    size = rows * _BUCKETS
    masses = np.bincount(index, weights=weights.ravel(), minlength=size).reshape(rows, _BUCKETS)
    limits = np.zeros(rows, np.float32)
    totals = masses.sum(axis=1)
    limited = np.flatnonzero(top_k > 0)
    if len(limited):
        counts = np.bincount(index, minlength=size).reshape(rows, _BUCKETS)[limited].astype(np.float64)
        wanted = top_k[limited].astype(np.float64)
        bucket, above = _find(counts, wanted)
        ordered = _sorted_bucket(weights[limited], buckets[limited], bucket)
        limits[limited] = _reach(ordered, (ordered > 0).astype(np.float64), above, wanted)
        kept = np.where(ordered >= limits[limited][:, None], ordered, 0).sum(axis=1, dtype=np.float64)
        places = np.arange(_BUCKETS)
        totals[limited] = np.where(places > bucket[:, None], masses[limited], 0).sum(axis=1) + kept
    nucleus = np.flatnonzero(top_p < 1)
    if len(nucleus):
        wanted = top_p[nucleus] * totals[nucleus]
        bucket, above = _find(masses[nucleus], wanted)
        ordered = _sorted_bucket(weights[nucleus], buckets[nucleus], bucket)
        reached = _reach(ordered, ordered.astype(np.float64), above, wanted)
        limits[nucleus] = np.maximum(limits[nucleus], reached)
    return limits


def _find(amounts: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The bucket in which the sum from the top reaches what is wanted, and the sum above it."""
    sums = np.cumsum(amounts[:, ::-1], axis=1)
    place = np.minimum((sums < wanted[:, None]).sum(axis=1), amounts.shape[1] - 1)
    rows = np.arange(len(amounts))
    bucket = amounts.shape[1] - 1 - place
    return bucket, sums[rows, place] - amounts[rows, bucket]


def _sorted_bucket(weights: np.ndarray, buckets: np.ndarray, bucket: np.ndarray) -> np.ndarray:
    """The weights of one bucket a row, descending, padded with zeros: float32 [n, most]."""
    rows, columns = np.nonzero(buckets == bucket[:, None])
    values = weights[rows, columns]
    order = np.lexsort((-values, rows))
    rows, values = rows[order], values[order]
    first = np.searchsorted(rows, np.arange(len(weights)))
    place = np.arange(len(rows)) - first[rows]
    ordered = np.zeros((len(weights), int(place.max(initial=0)) + 1), np.float32)
    ordered[rows, place] = values
    return ordered


def _reach(ordered: np.ndarray, amounts: np.ndarray, above: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The weight at which the running sum reaches what is wanted; the smallest one if rounding keeps it below."""
    reached = above[:, None] + np.cumsum(amounts, axis=1) >= wanted[:, None]
    last = np.maximum((ordered > 0).sum(axis=1) - 1, 0)
    place = np.where(reached.any(axis=1), reached.argmax(axis=1), last)
    return ordered[np.arange(len(ordered)), np.minimum(place, last)]
