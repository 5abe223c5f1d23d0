"""Names of blocks: equal exactly for equal prefixes."""

from __future__ import annotations

import numpy as np
import pytest
from deepinfer_sched.job.hashing import chain_ids, chain_names
from hypothesis import given
from hypothesis import strategies as st

tokens = st.lists(st.integers(0, 3), max_size=14)


@given(st.lists(tokens, min_size=1, max_size=12), st.integers(1, 5))
def test_names_are_equal_exactly_when_prefixes_are(requests, block_size):
    names, counts = chain_names(requests, block_size)
    assert counts.tolist() == [len(request) // block_size for request in requests]
    offsets = np.concatenate([[0], np.cumsum(counts)])
    seen = {}
    for row, request in enumerate(requests):
        for block in range(counts[row]):
            prefix = tuple(request[: (block + 1) * block_size])
            seen.setdefault(prefix, set()).add(int(names[offsets[row] + block]))
    assert all(len(values) == 1 for values in seen.values())
    assert len({next(iter(values)) for values in seen.values()}) == len(seen)


@pytest.mark.parametrize("block_size", [1, 2, 7, 16, 512])
def test_names_do_not_depend_on_the_batch(block_size):
    rng = np.random.default_rng(0)
    requests = [rng.integers(0, 1000, length) for length in (0, 3, 600, 1030, 2048)]
    together, _ = chain_names(requests, block_size)
    alone = np.concatenate([chain_names([request], block_size)[0] for request in requests])
    assert np.array_equal(together, alone)


def test_a_token_changed_anywhere_changes_every_name_after_it_and_none_before():
    rng = np.random.default_rng(1)
    request = rng.integers(0, 50_000, 160)
    plain, _ = chain_names([request], 16)
    for place in range(160):
        changed = request.copy()
        changed[place] += 1
        other, _ = chain_names([changed], 16)
        assert np.array_equal(plain != other, np.arange(10) >= place // 16), place


def test_swapped_blocks_have_other_names():
    first, _ = chain_names([[1, 2, 3, 4]], 2)
    second, _ = chain_names([[3, 4, 1, 2]], 2)
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_zero_tokens_are_not_invisible():
    names, _ = chain_names([[0] * 64], 16)
    assert len(set(names.tolist())) == 4


def test_block_ids_are_chained():
    names = chain_ids(np.array([5, 6, 7, 6], np.uint64), np.array([2, 2]))
    assert names[1] != names[3]
    same = chain_ids(np.array([5, 6, 5, 6], np.uint64), np.array([2, 2]))
    assert same[:2].tolist() == same[2:].tolist()
