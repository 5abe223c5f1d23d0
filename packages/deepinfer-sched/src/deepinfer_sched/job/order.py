"""Depth-first order over the prefix tree: whoever shares a prefix runs while it is in the cache."""

from __future__ import annotations

import numpy as np

from deepinfer_sched.job.tree import PrefixTree


def depth_first(tree: PrefixTree, outputs: np.ndarray) -> np.ndarray:
    """Order the requests so that each segment's requests are neighbours.

    Siblings may stand in any order without losing a hit, so that freedom is spent on the end of the job: the subtree
    with the longest expected output first (nobody waits for a straggler), then the one that holds most blocks, then
    the one that came first. The same holds for the requests below one segment.

    Args:
        tree: the prefix tree.
        outputs: int64 [n], expected output tokens of each request.

    Returns:
        int64 [n]: request indices in the order to run.
    """
    longest, held = _subtree_totals(tree, outputs)
    ending = np.bincount(tree.leaves[tree.leaves >= 0], minlength=len(tree.parents))  # requests that end in a segment
    rank = np.lexsort((tree.firsts, -held, -longest, tree.parents, tree.levels))  # parents before children
    begin = np.zeros(len(rank), np.int64)  # position of a segment's first request in the order
    level_of = tree.levels[rank]
    for level in range(int(level_of[-1]) + 1 if len(rank) else 0):
        nodes = rank[np.searchsorted(level_of, level) : np.searchsorted(level_of, level, side="right")]
        before = np.cumsum(tree.counts[nodes]) - tree.counts[nodes]
        parents = tree.parents[nodes]
        opens = np.concatenate([[True], parents[1:] != parents[:-1]])  # the first child of its parent
        sibling = before - np.repeat(before[opens], np.diff(np.append(np.flatnonzero(opens), len(nodes))))
        begin[nodes] = sibling + (begin[parents] + ending[parents] if level else 0)
    # Within one segment, requests that end there run before those that go deeper: their blocks are all there already.
    key = np.where(tree.leaves >= 0, begin[tree.leaves] if len(begin) else 0, len(outputs))
    return np.lexsort((np.arange(len(outputs)), -outputs, key))


def _subtree_totals(tree: PrefixTree, outputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Longest expected output below each segment, and the distinct blocks that its subtree holds."""
    longest = np.zeros(len(tree.parents), np.int64)
    has_blocks = tree.leaves >= 0
    np.maximum.at(longest, tree.leaves[has_blocks], outputs[has_blocks])
    held = tree.blocks.copy()
    by_level = np.argsort(tree.levels, kind="stable")
    bounds = np.searchsorted(tree.levels[by_level], np.arange(int(tree.levels.max(initial=-1)) + 2))
    for level in range(len(bounds) - 2, 0, -1):
        nodes = by_level[bounds[level] : bounds[level + 1]]
        np.maximum.at(longest, tree.parents[nodes], longest[nodes])
        np.add.at(held, tree.parents[nodes], held[nodes])
    return longest, held
