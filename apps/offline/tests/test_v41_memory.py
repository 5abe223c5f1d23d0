"""Bytes that a cached token costs: declared by the groups, and counted in pools of the released widths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from deepinfer_cache import CacheConfig, CacheManager
from deepinfer_offline.engine.base import EngineStartError
from deepinfer_offline.engine.native.memory import choose_strategy, paged_groups, plan_cache
from deepinfer_offline.models.base import CacheGroup
from deepinfer_offline.models.deepsig_v41.cache import V41Cache, allocate
from deepinfer_offline.models.deepsig_v41.model import V41Parts

SLICE = json.loads((Path(__file__).parent / "data" / "v41-slice" / "config.json").read_text())
RECORDS = 288 + 68  # bytes of a compressed entry and its index key


def released() -> dict[str, Any]:
    """The slice's widths with the released model's 40 layers: sources 2, 8, 14 of ratio 2, and 20 of ratio 1."""
    text = dict(SLICE["text_config"], num_hidden_layers=40, num_nextn_predict_layers=0, candidate_source_layer_id=20)
    text["compress_ratios"] = [0, 0, *[2] * 18, *[1] * 20]
    text["kv_source_layer_ids"] = text["index_source_layer_ids"] = [2, 8, 14, 20]
    text["dspark_target_layer_ids"] = [37, 38, 39]
    return {**SLICE, "text_config": text}


def prefix_bytes(cache: V41Cache) -> int:
    return sum(pool.nbytes for pools in (cache.compressed, cache.index_keys) for pool in pools.values())


@pytest.mark.parametrize(
    ("raw", "expected"), [(SLICE, RECORDS / 2 + RECORDS), (released(), 890)], ids=["slice", "released"]
)
@pytest.mark.parametrize("block_size", [16, 256])
def test_bytes_of_a_cached_token(raw: dict[str, Any], expected: float, block_size: int) -> None:
    """Allocated for a plan as the engine makes it; the prefix pools hold nothing but records, page 0 included."""
    spec = V41Parts.of(raw, block_size).spec
    groups = spec.groups()
    limits = CacheConfig(
        paged_groups(groups), 1, max_running=1, max_model_len=1024, max_tokens_per_step=64, max_in_flight=1
    )
    plan = plan_cache(groups, 64 << 20, limits)
    manager = CacheManager(plan.config)
    cache = allocate(spec, {group.name: manager.num_blocks(group.name) for group in groups}, "cpu")
    assert prefix_bytes(cache) / (manager.num_blocks("global") * block_size) == expected
    assert spec.global_bytes_per_token == expected
    assert cache.nbytes == plan.num_bytes <= 64 << 20
    assert sum(pool.nbytes for pool in cache.window) == manager.num_blocks("window") * block_size * 528 * len(
        spec.schedule.layers
    )


def test_full_windows_live_in_pages() -> None:
    """Under `full` a token keeps its window KV too: 528 bytes a layer beside the global entries."""
    spec = V41Parts.of(SLICE, 16).spec
    groups = spec.groups()
    limits = CacheConfig(
        paged_groups(groups), 1, max_running=1, max_model_len=1024, max_tokens_per_step=64, strategy="full"
    )
    plan = plan_cache(groups, 16 << 20, limits)
    manager = CacheManager(plan.config)
    cache = allocate(spec, {group.name: manager.num_blocks(group.name) for group in groups}, "cpu")
    pages = manager.num_blocks("global")
    assert manager.num_blocks("window") == pages
    assert (prefix_bytes(cache) + sum(pool.nbytes for pool in cache.window)) / (pages * 16) == RECORDS * 1.5 + 528 * 8
    assert cache.nbytes == plan.num_bytes


@pytest.mark.parametrize(
    ("wanted", "block_size", "chosen"),
    [
        ("auto", 16, "bounded"),
        ("exact", 16, "exact"),
        ("periodic", 16, "periodic(2048)"),
        ("periodic", 12, "periodic(2052)"),
        ("periodic", 3, "periodic(2052)"),  # whole blocks and whole pairs: multiples of 6
        ("periodic(48)", 16, "periodic(48)"),
    ],
)
def test_strategy_of_a_model_with_windows(wanted: str, block_size: int, chosen: str) -> None:
    assert choose_strategy(wanted, V41Parts.of(SLICE, block_size).spec.groups(), "slice") == chosen


def test_strategy_of_a_model_without_windows() -> None:
    groups = (CacheGroup("kv", "prefix", 16, 64),)
    assert choose_strategy("auto", groups, "llama") == "bounded"  # the cache has no window to apply it to
    with pytest.raises(EngineStartError, match="--window-strategy full: llama has no sliding windows"):
        choose_strategy("full", groups, "llama")
