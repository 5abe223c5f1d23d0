"""The prefix tree of a job, as arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """A compressed prefix tree (radix tree) over blocks. S segments, n requests; a parent comes before its children.

    A segment is a run of blocks that exactly the same requests contain. Unshared rests are segments with one request.

    Attributes:
        parents: int64 [S], -1 for a segment that starts at the first block.
        depths: int64 [S], blocks before the segment.
        blocks: int64 [S], blocks of the segment.
        counts: int64 [S], requests that contain it.
        levels: int64 [S], segments before it on its path.
        firsts: int64 [S], the lowest request that contains it.
        leaves: int64 [n], the last segment of each request, -1 if it has no block.
    """

    parents: np.ndarray
    depths: np.ndarray
    blocks: np.ndarray
    counts: np.ndarray
    levels: np.ndarray
    firsts: np.ndarray
    leaves: np.ndarray

    @property
    def distinct_blocks(self) -> int:
        return int(self.blocks.sum())

    @property
    def total_blocks(self) -> int:
        return int((self.blocks * self.counts).sum())

    def path(self, request: int) -> list[int]:
        """Segments of a request, first block first."""
        path = []
        segment = int(self.leaves[request])
        while segment >= 0:
            path.append(segment)
            segment = int(self.parents[segment])
        return path[::-1]


def build_tree(names: np.ndarray, counts: np.ndarray) -> PrefixTree:
    """Build the tree from prefix names (`hashing.chain_names`), one block position at a time.

    Requests are kept grouped by their common prefix. A group whose members agree on the next block costs one
    comparison a member; only groups that part are sorted, and a request that is alone leaves.
    """
    return _Builder(names, counts).run()


class _Builder:
    def __init__(self, names: np.ndarray, counts: np.ndarray) -> None:
        self.names = names
        self.request_blocks = counts
        self.offsets = np.cumsum(counts) - counts
        self.leaves = np.full(len(counts), -1, np.int64)
        # Rows: parents, depths, blocks, counts, levels, firsts. Each request ends one segment and parts from at most
        # one more, so 2n are enough.
        self.segments = np.zeros((6, 2 * len(counts)), np.int64)
        self.parents, self.depths, self.blocks, self.counts, self.levels, self.firsts = self.segments
        self.size = 0

    def run(self) -> PrefixTree:
        rows = np.flatnonzero(self.request_blocks > 0)
        groups = np.full(len(rows), -1, np.int64)  # segment that each row is in; equal values are neighbours
        depth = 0
        while len(rows):
            rows, groups = self._add_blocks(rows, groups, depth)
            depth += 1
        parents, depths, blocks, counts, levels, firsts = self.segments[:, : self.size].copy()
        return PrefixTree(parents, depths, blocks, counts, levels, firsts, self.leaves)

    def _add_blocks(self, rows: np.ndarray, groups: np.ndarray, depth: int) -> tuple[np.ndarray, np.ndarray]:
        """Add block `depth` of every row; return the rows that go on, with their groups."""
        names = self.names[self.offsets[rows] + depth]
        starts = np.flatnonzero(np.concatenate([[True], groups[1:] != groups[:-1]]))
        sizes = np.diff(np.append(starts, len(rows)))
        if depth:
            agree = np.logical_and.reduceat(names == np.repeat(names[starts], sizes), starts)
            agree &= self.counts[groups[starts]] == sizes  # else somebody ended before this block: a new segment
            self.blocks[groups[starts[agree]]] += 1
        else:
            agree = np.zeros(len(starts), bool)
        part = np.flatnonzero(~np.repeat(agree, sizes))
        if len(part):
            order = part[np.lexsort((rows[part], names[part], groups[part]))]
            rows[part], names[part], groups[part] = rows[order], names[order], groups[order]
            groups[part] = self._open_segments(rows[part], names[part], groups[part], depth)
        alone = self.counts[groups] == 1
        self.blocks[groups[alone]] = self.request_blocks[rows[alone]] - depth
        done = alone | (self.request_blocks[rows] == depth + 1)
        self.leaves[rows[done]] = groups[done]
        return rows[~done], groups[~done]

    def _open_segments(self, rows: np.ndarray, names: np.ndarray, groups: np.ndarray, depth: int) -> np.ndarray:
        """Open a segment for each run of equal (group, name); return each row's segment."""
        starts = np.flatnonzero(np.concatenate([[True], (groups[1:] != groups[:-1]) | (names[1:] != names[:-1])]))
        sizes = np.diff(np.append(starts, len(rows)))
        parents = groups[starts]
        new = slice(self.size, self.size + len(starts))
        self.parents[new], self.depths[new], self.blocks[new] = parents, depth, 1
        self.counts[new], self.firsts[new] = sizes, rows[starts]
        self.levels[new] = np.where(parents >= 0, self.levels[parents] + 1, 0)
        self.size = new.stop
        return np.repeat(np.arange(new.start, new.stop), sizes)
