"""Hit rates of a cache of any size, replayed over the prefix tree of a job.

Requests are replayed one after the other, which is how a prefix cache is usually judged. All blocks of a tree segment
are always used together, so whole segments are moved and the replay is exact while it costs a few operations a
request instead of a few a block.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heappop, heappush
from itertools import pairwise

import numpy as np

from deepinfer_sched.job.tree import PrefixTree

_NEVER = np.iinfo(np.int64).max


def replay_lru(tree: PrefixTree, order: np.ndarray, cache_blocks: int, *, heads_last: bool = False) -> int:
    """Blocks found when requests run in `order` over an LRU cache of `cache_blocks` blocks.

    Args:
        tree: the job.
        order: int [n], request indices.
        cache_blocks: blocks that the cache holds.
        heads_last: False is the textbook: a request uses its blocks first to last, so its last block is its most recent
            one. True is what paged caches do when they release a request, ours included: of one request's blocks the
            last is evicted first, so that a prefix outlives what follows it. A little better when memory is short.
    """
    segments, offsets = _paths(tree, order)
    sizes, path, bounds = tree.blocks.tolist(), segments.tolist(), offsets.tolist()
    resident: OrderedDict[int, int] = OrderedDict()  # segment -> blocks in the cache; the oldest comes first
    used = hits = 0
    for begin, end in pairwise(bounds):
        whole = True  # textbook: the head of a segment goes first, so what is left of it is of no use
        for segment in reversed(path[begin:end]) if heads_last else path[begin:end]:
            size = sizes[segment]
            found = resident.pop(segment, 0)
            whole &= found == size
            if heads_last or whole:
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
    for begin, end in pairwise(bounds):
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
