"""The longest hit over several kinds of cache, against its definition tried out one length at a time."""

import math
from types import SimpleNamespace

import pytest
from deepinfer_cache.adapters.vllm import translate
from deepinfer_cache.adapters.vllm.groups import GroupLayout, longest_hit
from hypothesis import given
from hypothesis import strategies as st

layouts = st.builds(
    GroupLayout,
    index=st.just(0),
    block_size=st.sampled_from([2, 4, 8]),
    window=st.none() | st.integers(0, 30),
    page_bytes=st.just(1),
)


@given(st.data())
def test_the_longest_hit_that_every_group_can_serve(data):
    groups = data.draw(st.lists(layouts, min_size=1, max_size=3))
    alignment = math.lcm(*(group.block_size for group in groups))
    length = data.draw(st.integers(0, 64))
    computed = data.draw(st.integers(0, length // alignment)) * alignment
    kept = [data.draw(st.sets(st.integers(0, 32), max_size=33)) for _ in groups]

    def served(hit):
        """Every token that a query at `hit` or later reads is on the device (below `computed`) or in a kept page."""
        for group, pages in zip(groups, kept, strict=True):
            first = 0 if group.window is None else max(0, hit - group.window)
            if any(t >= computed and t // group.block_size not in pages for t in range(first, hit)):
                return False
        return True

    lengths = [hit for hit in range(computed, length + 1, alignment) if served(hit)]
    found = longest_hit(groups, alignment, computed, length, lambda place, page: page in kept[place])
    assert found == max(lengths)


def test_a_hit_inside_a_page_of_the_device_is_left_alone():
    group = GroupLayout(0, 4, None, 1)
    assert longest_hit([group], 4, 6, 20, lambda *_: True) == 6


class FullAttentionSpec:
    block_size, page_size_bytes, attention_chunk_size = 16, 100, None


class MLAAttentionSpec(FullAttentionSpec):
    page_size_bytes = 30


class SlidingWindowSpec:
    block_size, page_size_bytes, num_retained_tokens = 32, 50, 127


class MambaSpec:
    block_size, page_size_bytes = 16, 9


def config(*specs, cacheable=None):
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=["a", "b"]) for spec in specs]
    ids = tuple(range(len(specs))) if cacheable is None else cacheable
    return SimpleNamespace(kv_cache_groups=groups, prefix_cacheable_group_ids=ids)


def test_groups_are_read_from_vllms_plan_of_the_cache():
    found = translate.cache_groups(config(FullAttentionSpec(), SlidingWindowSpec(), MLAAttentionSpec()))
    assert found == [GroupLayout(0, 16, None, 200), GroupLayout(1, 32, 127, 100), GroupLayout(2, 16, None, 60)]


def test_windows_that_vllm_replays_are_not_carried():
    found = translate.cache_groups(config(FullAttentionSpec(), SlidingWindowSpec(), cacheable=(0,)))
    assert [group.index for group in found] == [0]


def test_layers_of_unlike_sizes_in_one_group_are_added_up():
    mixed = SimpleNamespace(
        block_size=16, page_size_bytes=130, kv_cache_specs={"a": FullAttentionSpec(), "b": MLAAttentionSpec()}
    )
    assert translate.cache_groups(config(mixed)) == [GroupLayout(0, 16, None, 130)]


def test_other_kinds_of_cache_are_refused_by_name():
    with pytest.raises(ValueError, match="full and sliding-window attention, not MambaSpec: drop --kv-transfer-config"):
        translate.cache_groups(config(FullAttentionSpec(), MambaSpec()))
    with pytest.raises(ValueError, match="no prefix in this model's KV cache"):
        translate.cache_groups(config(MambaSpec(), cacheable=()))


def test_context_parallelism_is_refused_with_a_sentence():
    translate.require_whole_pages(SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1))
    with pytest.raises(ValueError, match="spreads them over 4 ranks: drop --kv-transfer-config"):
        translate.require_whole_pages(SimpleNamespace(decode_context_parallel_size=4, prefill_context_parallel_size=1))
