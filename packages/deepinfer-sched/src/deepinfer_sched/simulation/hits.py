"""Hit rates of a cache of any size, replayed over the prefix tree of a job.

Requests are replayed one after the other, which is how a prefix cache is usually judged. All blocks of a tree segment
are always used together, so whole segments are moved and the replay is exact while it costs a few operations a
request instead of a few a block.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from heapq import heappop, heappush

import numpy as np

from deepinfer_sched.job.tree import PrefixTree

_NEVER = np.iinfo(np.int64).max


def replay_lru(tree: PrefixTree, order: np.ndarray, cache_blocks: int) -> int:
    """Blocks found when requests run in `order` over an LRU cache of `cache_blocks` blocks.

    A request touches its last block first: a prefix is worth more than what follows it, and outlives it.
    """
    segments, offsets = _paths(tree, order)
    sizes, levels = tree.blocks.tolist(), segments.tolist()
    bounds = offsets.tolist()
    resident: OrderedDict[int, int] = OrderedDict()  # segment -> leading blocks in the cache; the oldest comes first
    used = hits = 0
    for begin, end in itertools.pairwise(bounds):
        for index in range(end - 1, begin - 1, -1):
            segment = levels[index]
            size = sizes[segment]
            found = resident.pop(segment, 0)
            hits += found
            used += size - found
            resident[segment] = size
        while used > cache_blocks:
            segment, size = resident.popitem(last=False)
            if used - size >= cache_blocks:
                used -= size
                continue
            resident[segment] = size - (used - cache_blocks)
            resident.move_to_end(segment, last=False)
            used = cache_blocks
    return hits


def replay_next_use(tree: PrefixTree, order: np.ndarray, cache_blocks: int) -> int:
    """Blocks found when the block whose next use is farthest away is evicted first (Belady, "MIN")."""
    segments, offsets = _paths(tree, order)
    following = _next_uses(segments, offsets).tolist()
    sizes, path, bounds = tree.blocks.tolist(), segments.tolist(), offsets.tolist()
    resident = [0] * len(sizes)
    due = [0] * len(sizes)  # the next use of each resident segment
    heap: list[tuple[int, int, int]] = []  # (-next use, -level, segment); outdated entries are skipped
    used = hits = 0
    for begin, end in itertools.pairwise(bounds):
        for index in range(begin, end):
            segment = path[index]
            hits += resident[segment]
            used += sizes[segment] - resident[segment]
            resident[segment] = sizes[segment]
            due[segment] = following[index]
            heappush(heap, (-following[index], begin - index, segment))
        while used > cache_blocks:
            next_use, level, segment = heappop(heap)
            if not resident[segment] or due[segment] != -next_use:
                continue
            size = resident[segment]
            if used - size >= cache_blocks:
                used -= size
                resident[segment] = 0
                continue
            resident[segment] = size - (used - cache_blocks)
            used = cache_blocks
            heappush(heap, (next_use, level, segment))
    return hits


def _paths(tree: PrefixTree, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Segments of each request in `order`, first block first, and the offsets of the requests (n + 1)."""
    leaves = tree.leaves[order]
    lengths = np.where(leaves >= 0, tree.levels[leaves] + 1, 0) if len(tree.levels) else np.zeros(len(order), np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    segments = np.empty(int(offsets[-1]), np.int64)
    rows = np.flatnonzero(lengths)
    current, place = leaves[rows], offsets[1:][rows] - 1
    while len(current):
        segments[place] = current
        current = tree.parents[current]
        inside = current >= 0
        current, place = current[inside], place[inside] - 1
    return segments, offsets


def _next_uses(segments: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """For each entry of `segments`, the request that uses the same segment next; a large number if none does."""
    request = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    by_segment = np.argsort(segments, kind="stable")
    following = np.full(len(segments), _NEVER)
    again = segments[by_segment[1:]] == segments[by_segment[:-1]]
    following[by_segment[:-1][again]] = request[by_segment[1:][again]]
    return following
