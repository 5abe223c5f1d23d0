"""The prefix tree against a plain dictionary of prefixes."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from deepinfer_sched.job.hashing import chain_names
from deepinfer_sched.job.tree import build_tree
from hypothesis import given
from hypothesis import strategies as st

requests_strategy = st.lists(st.lists(st.integers(0, 2), max_size=8), min_size=1, max_size=14)


def members(requests):
    """prefix -> the requests that start with it."""
    found = defaultdict(set)
    for row, request in enumerate(requests):
        for length in range(1, len(request) + 1):
            found[tuple(request[:length])].add(row)
    return found


@given(requests_strategy)
def test_paths_spell_out_each_request(requests):
    tree = build_tree(*chain_names(requests, 1))
    owners = members(requests)
    for row, request in enumerate(requests):
        depth = 0
        for level, segment in enumerate(tree.path(row)):
            assert tree.levels[segment] == level
            assert tree.depths[segment] == depth
            for _ in range(tree.blocks[segment]):
                depth += 1
                owner = owners[tuple(request[:depth])]
                assert tree.counts[segment] == len(owner)
                assert tree.firsts[segment] == min(owner)
        assert depth == len(request)


@given(requests_strategy)
def test_segments_are_as_long_as_they_can_be(requests):
    tree = build_tree(*chain_names(requests, 1))
    for segment, parent in enumerate(tree.parents.tolist()):
        assert parent < segment
        if parent >= 0:
            assert tree.counts[parent] > tree.counts[segment]
    owners = members(requests)
    assert tree.distinct_blocks == len(owners)
    assert tree.total_blocks == sum(len(rows) for rows in owners.values())


def test_no_blocks_at_all():
    tree = build_tree(np.zeros(0, np.uint64), np.zeros(3, np.int64))
    assert tree.leaves.tolist() == [-1, -1, -1]
    assert tree.total_blocks == 0
