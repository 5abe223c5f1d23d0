"""deepinfer-sched inside vLLM: prefix order raises vLLM's own hit counter to what the job allows."""

import random

import pytest
from vllm import SamplingParams

pytestmark = pytest.mark.vllm

SCHEDULER = "deepinfer_sched.adapters.vllm.scheduler.PrefixScheduler"
GROUPS, REQUESTS, SHARED, OWN, BLOCK = 20, 200, 320, 32, 16
KV_BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4  # layers x (key, value) x KV heads x head size x float32


def job():
    """200 prompts over 20 shared prefixes, shuffled: neighbours in the file share nothing."""
    rng = random.Random(0)
    prefixes = [[rng.randrange(3, 512) for _ in range(SHARED)] for _ in range(GROUPS)]
    prompts = [prefixes[i % GROUPS] + [rng.randrange(3, 512) for _ in range(OWN)] for i in range(REQUESTS)]
    rng.shuffle(prompts)
    return prompts


def bound():
    """The best hit rate possible: each shared prefix is computed once, whole blocks only."""
    return (REQUESTS - GROUPS) * SHARED / (REQUESTS * (SHARED + OWN))


def run(llm):
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in job()], params, use_tqdm=False)
    counters = {m.name: m.value for m in llm.get_metrics() if m.name.startswith("vllm:prefix_cache")}
    rate = counters["vllm:prefix_cache_hits"] / counters["vllm:prefix_cache_queries"]
    return rate, [list(o.outputs[0].token_ids) for o in outputs]


def test_prefix_order_reaches_the_bound_where_arrival_order_does_not(start_llm):
    # Room for the eight running requests and about two prefixes more: far fewer than the job's twenty.
    memory = KV_BYTES_PER_TOKEN * (8 * (SHARED + OWN + BLOCK) + 2 * SHARED)
    stock_rate, stock_tokens = run(start_llm(kv_cache_memory_bytes=memory))
    planned_rate, planned_tokens = run(start_llm(kv_cache_memory_bytes=memory, scheduler_cls=SCHEDULER))
    print(f"prefix hits: stock {stock_rate:.1%}, planned {planned_rate:.1%}, bound {bound():.1%}")
    assert planned_rate >= bound() - 0.02
    assert stock_rate < bound() - 0.3
    assert planned_tokens == stock_tokens


def test_steps_are_planned_asynchronously(start_llm):
    """A step is planned while the one before it is under way, and the tokens are those of synchronous planning."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    synchronous = run(start_llm(scheduler_cls=SCHEDULER, async_scheduling=False))[1]
    llm = start_llm(scheduler_cls=SCHEDULER)  # asynchronous planning is vLLM's default
    core = llm.llm_engine.engine_core.engine_core
    assert isinstance(core.scheduler, AsyncScheduler)
    assert type(core.scheduler).__module__.startswith("deepinfer_sched")
    under_way, schedule = [], core.scheduler.schedule

    def watched(*arguments, **keywords):
        under_way.append(len(core.batch_queue))
        return schedule(*arguments, **keywords)

    core.scheduler.schedule = watched
    asynchronous = run(llm)[1]
    assert core.async_scheduling
    assert sum(under_way) > len(under_way) / 2  # most steps were planned with one under way
    assert asynchronous == synchronous


def test_an_unknown_option_is_named(start_llm):
    with pytest.raises(Exception, match="has no option 'patiens'; it knows patience"):
        start_llm(scheduler_cls=SCHEDULER, additional_config={"deepinfer_sched": {"patiens": 3}})


def test_nothing_changes_unless_asked_for(start_llm):
    from deepinfer_sched.adapters.vllm import plugin

    plugin.register()
    plugin.register()
    scheduler = start_llm().llm_engine.engine_core.engine_core.scheduler
    assert type(scheduler).__module__.startswith("vllm.")
    assert type(scheduler.waiting).__module__.startswith("vllm.")
