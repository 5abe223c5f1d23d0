"""Jobs on a device that only a cost model knows."""

from __future__ import annotations

import numpy as np
import pytest
from deepinfer_sched import CostModel, SchedConfig, SchedConfigError, plan_job, simulate
from deepinfer_sched.simulation.replay import trace_requests

deepinfer_cache = pytest.importorskip("deepinfer_cache")


def cache(pages=200, running=8, longest=256, budget=64, **options):
    groups = options.pop("groups", (deepinfer_cache.CacheGroup("kv", "prefix", 4),))
    return deepinfer_cache.CacheManager(
        deepinfer_cache.CacheConfig(groups, pages, running, longest, max_tokens_per_step=budget, **options)
    )


def test_one_request_costs_what_the_model_says():
    cost = CostModel(step=1.0, token=0.1, kv_token=0.01, prompt_pair=0.001)
    report = simulate([(list(range(10)), 3)], cache(), SchedConfig(8, 64, 256), cost)
    assert (report.requests, report.steps, report.generated_tokens, report.computed_tokens) == (1, 3, 3, 10)
    prompt = 1.0 + 10 * 0.1 + 55 * 0.001  # 1 + 2 + ... + 10 pairs
    decode = sum(1.0 + 0.1 + 0.01 * length for length in (11, 12))
    assert report.seconds == pytest.approx(prompt + decode)


def test_a_cascade_reads_its_prefix_once():
    cost = CostModel(step=0, token=0, kv_token=1.0, prompt_pair=0)
    config = SchedConfig(8, 64, 256, cascade_min_tokens=4)
    job = [([*range(16), 50 + i], 2) for i in range(2)]
    assert simulate(job, cache(), config, cost).seconds == pytest.approx(18 + 18 - 16)


def test_planning_saves_time_and_tokens():
    rng = np.random.default_rng(0)
    shared = [rng.integers(0, 1000, 60) for _ in range(10)]
    prompts = [np.concatenate([shared[i % 10], rng.integers(0, 1000, 4)]) for i in range(80)]
    plan = plan_job(prompts, block_size=4)
    config = SchedConfig(8, 64, 256)
    planned = simulate([(prompts[i], 4) for i in plan.order], cache(100), config)
    arrival = simulate([(prompt, 4) for prompt in prompts], cache(100), config)
    assert planned.requests == arrival.requests == 80
    assert planned.hit_rate == pytest.approx(plan.bound, abs=0.01)
    assert planned.seconds < arrival.seconds
    assert planned.computed_tokens < 0.3 * arrival.computed_tokens
    assert planned.peak_pages <= 100


@pytest.mark.parametrize(("strategy", "replayed"), [("full", 0), ("periodic(8)", 4), ("bounded", 8), ("exact", 14)])
def test_window_strategies_differ_in_what_they_compute_again(strategy, replayed):
    groups = (deepinfer_cache.CacheGroup("kv", "prefix", 4), deepinfer_cache.CacheGroup("swa", "window", 4, window=8))
    job = [(list(range(60)), 1), ([*range(60), 99, 98], 1)]
    config = SchedConfig(1, 64, 256)
    report = simulate(job, cache(running=1, groups=groups, strategy=strategy, num_layers=2), config)
    assert report.cached_tokens == 60
    assert report.computed_tokens == 60 + 2 + replayed


def test_a_trace_is_spelled_so_that_its_blocks_are_found_again():
    job = list(trace_requests([[1, 2, 3], [1, 2, 4], [1 + 2**32, 2]], [12, 11, 8], [1, 1, 1], 4))
    assert [len(prompt) for prompt, _ in job] == [12, 11, 8]
    report = simulate(job, cache(running=1), SchedConfig(1, 64, 256))
    assert report.cached_tokens == 8


def test_costs_are_not_negative():
    with pytest.raises(SchedConfigError, match="token"):
        CostModel(token=-1)
