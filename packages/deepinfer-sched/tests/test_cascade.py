"""Which decode rows attend a prefix together."""

from __future__ import annotations

import numpy as np
from deepinfer_sched.cascade import CascadeFinder, find_shared_prefixes
from hypothesis import given
from hypothesis import strategies as st

tables = st.lists(st.lists(st.integers(1, 2), min_size=4, max_size=4), min_size=1, max_size=7)


def common(rows):
    """Pages that all rows start with."""
    length = 0
    for column in zip(*rows, strict=True):
        if len(set(column)) > 1:
            break
        length += 1
    return length


def best_saving(rows, min_pages):
    """Reads saved by the best partition into groups, found by trying all of them."""
    if not rows:
        return 0
    first, rest = rows[0], rows[1:]
    best = 0
    for mask in range(2 ** len(rest)):
        group = [first] + [row for i, row in enumerate(rest) if mask >> i & 1]
        others = [row for i, row in enumerate(rest) if not mask >> i & 1]
        shared = common(group)
        own = (len(group) - 1) * shared if shared >= min_pages else 0
        best = max(best, own + best_saving(others, min_pages))
    return best


@given(tables, st.integers(1, 3))
def test_groups_share_what_they_say_and_save_nearly_the_most(rows, min_pages):
    groups = find_shared_prefixes(np.array(rows, np.int32), np.full(len(rows), 4), min_pages)
    used = [row for members, _ in groups for row in members.tolist()]
    assert len(used) == len(set(used))
    for members, pages in groups:
        assert members.tolist() == sorted(members.tolist())
        assert len(members) >= 2
        assert pages >= min_pages
        assert common([rows[i] for i in members]) >= pages
    saved = sum((len(members) - 1) * pages for members, pages in groups)
    assert 0.75 * best_saving(rows, min_pages) <= saved <= best_saving(rows, min_pages)
    together = common(rows)
    assert saved >= ((len(rows) - 1) * together if together >= min_pages else 0)


def test_sharing_ends_where_the_shortest_prompt_ends():
    table = np.array([[5, 6, 7, 0], [5, 6, 7, 0]], np.int32)
    ((members, pages),) = find_shared_prefixes(table, np.array([3, 2]), 1)
    assert members.tolist() == [0, 1]
    assert pages == 2


def test_unused_table_entries_are_not_shared():
    assert find_shared_prefixes(np.zeros((3, 4), np.int32), np.zeros(3, int), 1) == []


def test_a_deep_group_is_preferred_to_a_wide_shallow_one():
    table = np.array([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 9, 9, 9, 8], [1, 9, 9, 9, 8]], np.int32)
    groups = find_shared_prefixes(table, np.full(4, 5), 1)
    assert [(members.tolist(), pages) for members, pages in groups] == [([0, 1], 5), ([2, 3], 5)]


def test_rows_without_a_deep_partner_share_the_shallow_prefix():
    table = np.array([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 9, 0, 0, 0], [1, 8, 0, 0, 0], [1, 7, 0, 0, 0]], np.int32)
    groups = find_shared_prefixes(table, np.array([5, 5, 2, 2, 2]), 1)
    assert [(members.tolist(), pages) for members, pages in groups] == [([0, 1], 5), ([2, 3, 4], 1)]


def test_long_chains_of_prefixes_take_no_time():
    depth = 1500
    table = np.where(np.arange(depth) < np.arange(1, depth + 1)[:, None], np.arange(1, depth + 1), 0).astype(np.int32)
    groups = find_shared_prefixes(table, np.arange(1, depth + 1), 1)
    assert groups


def test_the_finder_looks_again_only_after_a_change():
    finder = CascadeFinder(page_size=4, min_rows=2, min_tokens=8)
    pages = np.array([[1, 2, 3], [1, 2, 4], [8, 8, 8]], np.int32)
    slots, prompts = np.array([0, 1], np.int32), np.array([12, 12])
    (cascade,) = finder.find(slots, prompts, pages, 1)
    assert (cascade.rows.tolist(), cascade.blocks, cascade.tokens) == ([0, 1], 2, 8)
    assert finder.find(slots, prompts, pages, 1)[0] is cascade
    pages[1] = 7
    assert finder.find(slots, prompts, pages, 2) == ()
    assert finder.find(slots[:1], prompts[:1], pages, 3) == ()
