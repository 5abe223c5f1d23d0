"""Names for token blocks, computed for many requests at once.

A planner only needs names that are equal for equal prefixes and differ otherwise with overwhelming probability (64
bits); it never serves cached data under them, so they need not resist an attacker. `deepinfer_cache` has its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

TokenIds = Sequence[int] | np.ndarray

_MIX_1 = np.uint64(0x9E3779B97F4A7C15)
_MIX_2 = np.uint64(0xD6E8FEB86659FD93)
_ROWS = 4096


def chain_names(requests: Sequence[TokenIds], block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Names of the full blocks of each request; a name covers everything from the first token on.

    Args:
        requests: token ids of each request; integer arrays are read without a Python loop over tokens.
        block_size: tokens of a block.

    Returns:
        names uint64 [total], request after request, and counts int64 [n].
    """
    arrays = [_as_uint32(tokens) for tokens in requests]
    counts = np.array([len(array) // block_size for array in arrays], np.int64)
    if not counts.sum():
        return np.zeros(0, np.uint64), counts
    width = block_size + block_size % 2  # two tokens are hashed as one 64-bit word
    if width == block_size:
        flat = np.concatenate([array[: count * block_size] for array, count in zip(arrays, counts, strict=True)])
    else:
        flat = np.zeros((int(counts.sum()), width), np.uint32)
        parts = [array[: count * block_size] for array, count in zip(arrays, counts, strict=True)]
        flat[:, :block_size] = np.concatenate(parts).reshape(-1, block_size)
    return chain_ids(_block_words(flat.reshape(-1, width).view(np.uint64)), counts), counts


def chain_ids(blocks: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Turn names of single blocks into names of prefixes.

    Args:
        blocks: uint64 [total], a name for the content of each block, request after request.
        counts: int64 [n], blocks of each request.

    Returns:
        uint64 [total]: entry i of a request is a random linear form of its blocks 0 .. i, mixed.
    """
    if not len(blocks):
        return np.zeros(0, np.uint64)
    first = np.cumsum(counts) - counts
    position = np.arange(len(blocks)) - np.repeat(first, counts)
    weights = _odd_numbers(int(counts.max(initial=0)), seed=2)
    sums = np.cumsum(_mix(blocks) * weights[position], dtype=np.uint64)
    before = np.where(first > 0, sums[np.maximum(first, 1) - 1], np.uint64(0))
    return _mix(sums - np.repeat(before, counts) + position.astype(np.uint64))


def _block_words(words: np.ndarray) -> np.ndarray:
    """uint64 [blocks, words] -> uint64 [blocks]."""
    weights = _odd_numbers(words.shape[1], seed=1)
    names = np.empty(len(words), np.uint64)
    for start in range(0, len(words), _ROWS):  # small pieces stay in the processor's cache: eight times as fast
        mixed = words[start : start + _ROWS] * _MIX_1
        mixed ^= mixed >> np.uint64(32)
        names[start : start + _ROWS] = mixed @ weights
    return names


def _mix(values: np.ndarray) -> np.ndarray:
    mixed = (values ^ (values >> np.uint64(31))) * _MIX_2
    return mixed ^ (mixed >> np.uint64(29))


def _odd_numbers(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**64, count, np.uint64) | np.uint64(1)


def _as_uint32(tokens: TokenIds) -> np.ndarray:
    return np.ascontiguousarray(tokens, dtype=np.uint32)
