"""A cache manager, one behaviour at a time. Random lives are test_state_machine's."""

from __future__ import annotations

import numpy as np
import pytest
from deepinfer_cache import (
    MISS,
    CacheConfig,
    CacheConfigError,
    CacheGroup,
    CacheManager,
    IntegrityError,
    SlotError,
    chain_hashes,
    integrity,
)
from hypothesis import given
from hypothesis import strategies as st

KV = (CacheGroup("kv", "prefix", 4),)


def make(pages=8, groups=KV, **options):
    return CacheManager(CacheConfig(groups, pages, 2, 64, **options))


def compute(cache, slot, tokens, salt=b""):
    """Admit, fill and publish a sequence."""
    hashes = cache.hash_tokens(tokens, salt)
    hit = cache.match(hashes, len(tokens))
    assert cache.allocate(slot, len(tokens), hit)
    cache.commit(slot, hashes, len(tokens))
    return hit


def test_a_prefix_is_found_up_to_its_last_full_page():
    cache = make()
    compute(cache, 0, list(range(11)))
    assert compute(cache, 1, [*range(11), 50]).length == 8
    assert cache.pages[0, :2].tolist() == cache.pages[1, :2].tolist()
    assert cache.pages[0, 2] != cache.pages[1, 2]


def test_one_token_is_always_left_to_compute():
    cache = make()
    compute(cache, 0, list(range(8)))
    assert cache.match(cache.hash_tokens(list(range(8))), 8).length == 4


def test_salts_do_not_share():
    cache = make()
    compute(cache, 0, list(range(8)), b"a")
    assert compute(cache, 1, list(range(9)), b"b") == MISS


def test_the_cache_can_be_switched_off():
    cache = make(enable_prefix_cache=False)
    compute(cache, 0, list(range(8)))
    assert compute(cache, 1, list(range(9))) == MISS
    cache.free(0)
    assert cache.stats().cached_pages == 0


def test_what_does_not_fit_changes_nothing():
    cache = make(pages=3)
    compute(cache, 0, list(range(8)))
    before = cache.pages.copy()
    assert not cache.allocate(1, 12, MISS)
    assert not cache.allocate(0, 17)
    assert np.array_equal(cache.pages, before)
    assert cache.allocate(0, 12)
    integrity.check(cache)


def test_the_end_of_a_prefix_is_evicted_before_its_beginning():
    cache = make(pages=4)
    compute(cache, 0, list(range(16)))
    cache.free(0)
    compute(cache, 1, [90, 91, 92, 93, 94])
    assert cache.match(cache.hash_tokens(list(range(16))), 99).length == 8
    assert cache.stats().evictions == 2


def test_a_used_page_is_never_evicted():
    cache = make(pages=3)
    compute(cache, 0, list(range(12)))
    assert not cache.allocate(1, 1, MISS)


def test_pages_return_when_the_last_step_that_reads_them_is_done():
    cache = make(pages=2)
    cache.begin(1)
    compute(cache, 0, list(range(8)))
    cache.begin(2)
    cache.free(0, fence=2)
    assert (cache.available_pages, cache.fenced_pages) == (0, 2)
    cache.complete(1)
    assert cache.available_pages == 0
    cache.complete(2)
    assert (cache.available_pages, cache.fenced_pages) == (2, 0)


def test_a_page_behind_a_fence_can_still_be_hit():
    cache = make()
    cache.begin(1)
    compute(cache, 0, list(range(8)))
    cache.free(0)
    assert compute(cache, 1, list(range(9))).length == 8
    cache.complete(1)
    integrity.check(cache)


def test_two_that_compute_the_same_keep_one_findable_copy():
    cache = make()
    hashes = cache.hash_tokens(list(range(8)))
    for slot in (0, 1):
        cache.allocate(slot, 8, MISS)
    for slot in (0, 1):
        cache.commit(slot, hashes, 8)
    cache.free(0)
    cache.free(1)
    cache.complete(1)
    assert cache.stats().cached_pages == 2
    integrity.check(cache)


GROUPS = (
    CacheGroup("large", "prefix", 8, tokens_per_entry=2, entry_bytes=10),
    CacheGroup("small", "prefix", 4, entry_bytes=3),
    CacheGroup("ring", "state", entry_bytes=7),
)


def test_groups_of_several_block_sizes_share_one_hit():
    cache = make(groups=GROUPS)
    assert cache.page_size == 8
    assert cache.config.page_bytes == 4 * 10 + 2 * 4 * 3
    compute(cache, 0, list(range(20)))
    assert compute(cache, 1, [*range(15), 99, 99]).length == 8
    large, small = cache.block_table("large"), cache.block_table("small")
    assert small.shape[1] == 2 * large.shape[1]
    assert small[0, :6].tolist() == [block for page in large[0, :3] for block in (2 * page, 2 * page + 1)]
    assert not small[0, 6:].any()
    assert len({*small[0, :6]} | {*small[1, 2:6]}) == 10  # only the first page is shared
    assert max(small.max(), 0) < cache.num_blocks("small")
    assert cache.block_table("ring")[:, 0].tolist() == [1, 2]
    assert cache.num_blocks("ring") == 3


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 7), st.integers(0, 6))
def test_hashes_can_be_continued(tokens, page_size, known):
    whole = chain_hashes(tokens, page_size)
    assert len(whole) == len(tokens) // page_size
    assert chain_hashes(tokens, page_size, known=whole[:known]) == whole
    assert len(set(whole)) == len(whole)
    if whole:
        assert chain_hashes(tokens, page_size, b"salt")[0] != whole[0]


@pytest.mark.parametrize("wrong", [
    {"kind": "ring"}, {"kind": "prefix", "block_size": 0}, {"kind": "prefix", "tokens_per_entry": 3},
    {"kind": "window"}, {"kind": "prefix", "window": 4},
])  # fmt: skip
def test_groups_that_cannot_work_are_named(wrong):
    with pytest.raises(CacheConfigError, match="'kv'"):
        CacheGroup("kv", **{"block_size": 16, **wrong})


@pytest.mark.parametrize(("wrong", "says"), [
    ({"groups": ()}, "distinct"), ({"num_pages": 0}, "num_pages 0"), ({"eviction": "fifo"}, "'fifo'"),
    ({"max_checkpoints": -1}, "-1"), ({"groups": (GROUPS[0], GROUPS[0])}, "distinct"),
])  # fmt: skip
def test_configurations_that_cannot_work_are_named(wrong, says):
    with pytest.raises(CacheConfigError, match=says):
        CacheConfig(**{"groups": GROUPS, "num_pages": 4, **wrong})


def test_slots_are_not_confused():
    cache = make()
    with pytest.raises(SlotError, match="not open"):
        cache.free(0)
    with pytest.raises(SlotError, match="not open"):
        cache.allocate(0, 4)
    compute(cache, 0, [1, 2])
    with pytest.raises(SlotError, match="in use"):
        cache.allocate(0, 4, MISS)
    with pytest.raises(CacheConfigError, match="no group 'other'"):
        cache.block_table("other")


def spoil_references(cache):
    cache._pool.refs[int(cache.pages[0, 0])] += 1


def spoil_table(cache):
    cache.pages[0, 0] = 0


def spoil_tail(cache):
    cache.pages[0, 9] = 3


def spoil_index(cache):
    cache._pool.index.popitem()


def spoil_free_list(cache):
    cache._pool._free.append(cache._pool._free[0])


def spoil_fence_count(cache):
    cache._fenced_pages += 1


def spoil_window(cache):
    cache._windows["swa"].refs[1] += 1


@pytest.mark.parametrize(
    "spoil", [spoil_references, spoil_table, spoil_tail, spoil_index, spoil_free_list, spoil_fence_count, spoil_window]
)
def test_every_contradiction_is_found(spoil):
    cache = make(groups=(CacheGroup("kv", "prefix", 4), CacheGroup("swa", "window", 4, window=8)))
    compute(cache, 0, list(range(12)))
    cache.place_windows(np.array([0]), np.array([0]), np.array([12]))
    integrity.check(cache)
    spoil(cache)
    with pytest.raises(IntegrityError) as found:
        integrity.check(cache)
    assert found.value.problems


PAIRS = (
    CacheGroup("kv", "prefix", 1),
    CacheGroup("swa", "window", 1, window=8),
    CacheGroup("pairs", "state", hit_multiple=2),
)


@pytest.mark.parametrize(
    ("strategy", "groups", "found", "start"),
    [
        ("full", PAIRS, 20, 20),  # nothing is replayed, so nobody would rebuild the pair of tokens 20 and 21
        ("bounded", PAIRS, 21, 13),
        ("exact", PAIRS, 21, 14),
        ("bounded", (PAIRS[0], PAIRS[2]), 20, 20),
        ("full", PAIRS[:2], 21, 21),
        ("full", (CacheGroup("kv", "prefix", 3), CacheGroup("pairs", "state", hit_multiple=2)), 18, 18),
    ],
)
def test_a_hit_ends_where_state_is_empty_unless_it_is_rebuilt(strategy, groups, found, start):
    cache = make(pages=40, groups=groups, strategy=strategy)
    compute(cache, 0, list(range(21)))
    hit = compute(cache, 1, list(range(25)))
    assert (hit.length, hit.start) == (found, start)
    assert len(hit.pages) * cache.page_size == found
    integrity.check(cache)


def test_kept_windows_end_where_state_is_empty():
    with pytest.raises(CacheConfigError, match="multiple of 2"):
        make(groups=PAIRS, strategy="periodic(5)")


@pytest.mark.parametrize("multiple", [0, -2])
def test_hit_multiple_is_positive(multiple):
    with pytest.raises(CacheConfigError, match=f"hit_multiple {multiple}"):
        CacheGroup("pairs", "state", hit_multiple=multiple)
