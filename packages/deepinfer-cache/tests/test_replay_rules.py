"""The twelve rules of bounded replay (V4.1 notes, section 4.2), one test each, and the edge cases of 4.3 to 4.8."""

from __future__ import annotations

import numpy as np
import pytest
from deepinfer_cache import MISS, CacheConfig, CacheGroup, CacheManager, make_strategy
from deepinfer_cache.replay import resume_with_window, trim_rows, window_floors, window_mask, written_entries
from hypothesis import given
from hypothesis import strategies as st

W = 8
PAGE = 4
GROUPS = (
    CacheGroup("global2", "prefix", PAGE, tokens_per_entry=2),
    CacheGroup("global1", "prefix", PAGE),
    CacheGroup("swa", "window", 2, window=W),
    CacheGroup("pair", "state"),
)


def make_cache(strategy="bounded", **options):
    options = {"num_pages": 64, "max_running": 4, "max_model_len": 128, "max_tokens_per_step": 64, **options}
    return CacheManager(CacheConfig(GROUPS, strategy=strategy, **options))


def run_one(cache, slot, tokens, step, start=0, hit=MISS):
    """Admit a sequence and compute it in one step."""
    hashes = cache.hash_tokens(tokens)
    cache.begin(step)
    assert cache.allocate(slot, len(tokens), hit)
    cache.commit(slot, hashes, len(tokens))
    cache.place_windows(np.array([slot]), np.array([start]), np.array([len(tokens)]))
    cache.complete(step)
    return hashes


def cached(tokens, strategy="bounded"):
    """A cache in which `tokens` were computed, their sequence gone."""
    cache = make_cache(strategy)
    run_one(cache, 0, tokens, 1)
    cache.free(0)
    return cache


def match(cache, tokens):
    return cache.match(cache.hash_tokens(tokens), len(tokens))


def test_rule_1_hits_are_aligned_and_odd_tails_are_computed():
    cache = cached(list(range(30)))
    hit = match(cache, [*range(27), 99, 99, 99, 99])
    assert hit.length == 24  # 27 tokens agree; pages hold 4, and both ratios divide a page


@pytest.mark.parametrize("pages", [1, 2])
def test_rule_2_a_hit_within_the_window_is_dropped(pages):
    cache = cached(list(range(PAGE * pages)))
    assert match(cache, [*range(PAGE * pages), 99, 99]) == MISS


def test_rule_2_a_longer_hit_replays_its_last_window():
    cache = cached(list(range(12)))
    hit = match(cache, [*range(12), 99])
    assert (hit.length, hit.replay_start, hit.start) == (12, 12 - W, 12 - W)


def test_rule_3_blocks_of_the_hit_are_shared_and_window_blocks_start_at_the_replay():
    cache = cached(list(range(20)))
    tokens = [*range(20), *range(90, 96)]
    hit = match(cache, tokens)
    run_one(cache, 1, tokens, 2, start=hit.start, hit=hit)
    assert cache.block_table("global1")[1, :5].tolist() == list(hit.pages)
    assert len(np.unique(cache.block_table("global1")[1, :7])) == 7  # 26 tokens: seven pages, two of them new
    window = cache.block_table("swa")[1]
    first = hit.start // 2
    assert not window[:first].any()
    assert window[first : 26 // 2].all()


@pytest.mark.parametrize("cut", [1, 3, 8, 9])
def test_rule_3_chunks_may_cut_anywhere_even_inside_the_replay(cut):
    cache = cached(list(range(20)))
    tokens = [*range(20), *range(90, 96)]
    hit = match(cache, tokens)
    cache.begin(2)
    cache.allocate(1, 26, hit)
    for step, (start, end) in enumerate([(hit.start, hit.start + cut), (hit.start + cut, 26)], start=2):
        cache.begin(step)
        cache.place_windows(np.array([1]), np.array([start]), np.array([end]))
        seen = range(max(hit.replay_start, start - W + 1), end)  # every key that a row of this chunk may read
        assert all(cache.block_table("swa")[1, position // 2] for position in seen)


def test_rule_4_prefill_rows_carry_the_floor_and_decode_rows_none():
    floors = window_floors(np.array([12, 12, 0]), np.array([True, False, True]))
    assert floors.tolist() == [12, 0, 0]
    positions = np.arange(12, 40)
    prompt = window_mask(positions, np.arange(40), W, 12)
    assert not prompt[:, :12].any()
    # A decode row stands at N >= H = s + W, so its window begins at or above s without a floor.
    decode = window_mask(np.array([12 + W]), np.arange(40), W, 0)
    assert not decode[:, :12].any()


@pytest.mark.parametrize("ratio", [1, 2])
def test_rule_5_only_entries_that_end_at_or_behind_the_hit_are_written(ratio):
    entries = written_entries(start=4, end=20, ratio=ratio, write_floor=12)
    assert entries.tolist() == list(range(12 // ratio, 20 // ratio))


def test_rule_5_a_pair_that_straddles_an_odd_hit_is_completed():
    assert written_entries(start=5, end=16, ratio=2, write_floor=13).tolist() == [6, 7]  # 6 = tokens 12 and 13
    assert written_entries(start=5, end=16, ratio=2, write_floor=14).tolist() == [7]


@given(st.integers(0, 60), st.integers(1, 40), st.integers(1, 3), st.integers(0, 70), st.data())
def test_rule_5_chunks_write_each_entry_exactly_once(start, count, ratio, floor, data):
    cut = data.draw(st.integers(0, count))
    whole = written_entries(start, start + count, ratio, floor).tolist()
    parts = [
        *written_entries(start, start + cut, ratio, floor),
        *written_entries(start + cut, start + count, ratio, floor),
    ]
    assert parts == whole
    expected = [j for j in range(200) if start <= (j + 1) * ratio - 1 < start + count and (j + 1) * ratio - 1 >= floor]
    assert whole == expected


def test_rule_6_a_full_hit_needs_no_extra_token():
    cache = cached(list(range(16)))
    hit = match(cache, list(range(16)))
    assert (hit.length, hit.start) == (16, 16 - W)  # the last row is replayed, so its logits are there


def test_rule_7_inputs_are_needed_from_the_replay_start_and_ids_before_it():
    cache = cached(list(range(20)))
    hit = match(cache, [*range(20), 99])
    assert hit.start == hit.replay_start == 20 - W  # embeddings of [s, H) are computed again; ids below s are known


def test_rule_8_windows_are_never_found():
    cache = cached(list(range(20)))
    assert not cache.block_table("swa").any()
    assert cache._windows["swa"].used == 0
    assert cache.stats().cached_pages == 5


def test_rule_9_a_window_that_comes_with_the_hit_needs_no_replay():
    assert resume_with_window(20, 30).start == 20
    assert resume_with_window(20, 30).replay_start == 0
    assert resume_with_window(20, 20).start == 19  # everything is there: the last token is computed for its logits


def test_rule_10_prompt_chunks_keep_their_last_window_of_rows():
    trim = trim_rows(
        np.array([1, 300, 100]), np.array([700, 300, 150]), np.array([9, 0, 50]),
        np.array([False, True, True]), np.zeros(3, bool), 128,
    )  # fmt: skip
    assert trim.kept.tolist() == [1, 128, 100]
    assert trim.floors.tolist() == [0, 172, 50]
    assert len(trim.rows) == 229
    assert trim.rows.tolist() == [0, *range(173, 301), *range(301, 401)]


def test_rule_10_requests_that_want_every_row_keep_all():
    trim = trim_rows(np.array([300]), np.array([300]), np.array([0]), np.array([True]), np.array([True]), 128)
    assert trim.kept.tolist() == [300]
    assert trim.floors.tolist() == [0]


def test_rule_10_the_floor_of_a_trimmed_chunk_is_never_below_the_replay_start():
    trim = trim_rows(np.array([200]), np.array([300]), np.array([250]), np.array([True]), np.array([False]), 128)
    assert trim.floors.tolist() == [250]


@pytest.mark.parametrize("count", [1, 127, 128])
def test_rule_11_short_chunks_are_not_trimmed(count):
    trim = trim_rows(np.array([count]), np.array([500]), np.array([40]), np.array([True]), np.array([False]), 128)
    assert trim.kept.tolist() == [count]
    assert trim.floors.tolist() == [40]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_rule_11_every_window_read_finds_a_row_that_was_kept(chunks):
    kept_rows, end = set(), 0
    for count in chunks:
        end += count
        trim = trim_rows(np.array([count]), np.array([end]), np.array([0]), np.array([True]), np.array([False]), W)
        rows = range(end - int(trim.kept[0]), end)
        kept_rows.update(rows)
        for query in rows:
            assert all(key in kept_rows for key in range(max(query - W + 1, int(trim.floors[0]), 0), query + 1))


def test_rule_12_decode_and_verification_rows_are_never_trimmed():
    trim = trim_rows(
        np.array([1, 200]), np.array([400, 600]), np.array([0, 0]), np.zeros(2, bool), np.zeros(2, bool), 128
    )
    assert trim.kept.tolist() == [1, 200]
    assert trim.floors.tolist() == [0, 0]


# --- edge cases of sections 4.3 to 4.8 ---------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "start"), [(W, 0), (W + PAGE, PAGE), (W + 2 * PAGE, 2 * PAGE)])
def test_hits_around_the_window(length, start):
    cache = cached(list(range(length)))
    hit = match(cache, [*range(length), 99])
    assert hit.start == start
    assert hit.length == (length if start else 0)


def test_what_survives_a_failed_load_is_replayed_like_any_hit():
    cache = cached(list(range(20)))
    survived = cache.hash_tokens(list(range(20)))[:3]
    assert cache.match(survived, 40).replay_start == 12 - W


def test_resuming_after_preemption_replays_generated_tokens_too():
    cache = make_cache()
    tokens = list(range(18))
    hashes = run_one(cache, 0, tokens, 1)
    tokens += [70, 71, 72]
    cache.begin(2)
    cache.allocate(0, 21)
    hashes = cache.hash_tokens(tokens, known=hashes)
    cache.commit(0, hashes, 21)
    cache.free(0)
    cache.complete(2)
    hit = match(cache, tokens)
    assert (hit.length, hit.replay_start) == (20, 20 - W)


def test_statistics_count_the_whole_hit_not_the_replay():
    cache = cached(list(range(20)))
    tokens = [*range(20), *range(90, 96)]
    run_one(cache, 1, tokens, 2, start=20 - W, hit=match(cache, tokens))
    assert cache.stats().hit_tokens == 20


# --- the other strategies, section 5 -----------------------------------------------------------------------------


def test_full_goes_on_right_after_the_hit_and_shares_windows():
    cache = cached(list(range(20)), "full")
    tokens = [*range(20), 99]
    hit = match(cache, tokens)
    assert (hit.length, hit.start, hit.replay_start) == (20, 20, 0)
    run_one(cache, 1, tokens, 2, start=20, hit=hit)
    assert cache.block_table("swa")[1, :10].all()  # the window before the hit is there, and older ones too


def test_exact_replays_every_layers_window():
    strategy = make_strategy("exact", W, 3, PAGE)
    resume = strategy.resume(40, 50)
    assert resume.start == 40 - 3 * (W - 1)
    assert strategy.resume(3 * (W - 1), 50).length == 0  # nothing would be saved
    assert strategy.resume(3 * (W - 1) + 1, 50).start == 1


def test_periodic_goes_on_from_the_last_window_that_was_kept():
    cache = cached(list(range(30)), "periodic(8)")
    tokens = [*range(28), 99, 99]
    hit = match(cache, tokens)
    assert (hit.length, hit.start, hit.replay_start, hit.write_floor) == (28, 24, 0, 28)
    run_one(cache, 1, tokens, 2, start=24, hit=hit)
    assert cache.block_table("swa")[1, (24 - W + 1) // 2 : 12].all()


def test_periodic_without_a_kept_window_computes_everything():
    cache = make_cache("periodic(8)", max_checkpoints=0)
    run_one(cache, 0, list(range(30)), 1)
    cache.free(0)
    assert match(cache, [*range(28), 99]) == MISS


def test_periodic_forgets_the_oldest_window_first():
    cache = make_cache("periodic(8)", max_checkpoints=1)
    run_one(cache, 0, list(range(30)), 1)
    cache.free(0)
    assert match(cache, [*range(28), 99]).start == 24
    assert match(cache, [*range(16), 99]) == MISS  # the window at 16 gave way to the one at 24


@pytest.mark.parametrize("wrong", ["half", "periodic(6)", "periodic(0)", "periodic"])
def test_unknown_strategies_are_named(wrong):
    with pytest.raises(ValueError, match="strategy"):
        make_strategy(wrong, W, 1, PAGE)


@pytest.mark.parametrize("strategy", ["full", "exact", "bounded", "periodic(8)"])
def test_without_windows_every_strategy_is_the_same(strategy):
    assert make_strategy(strategy, 0, 1, PAGE).resume(12, 20).start == 12
