"""Planning and applying steps: this scheduler against vLLM's, the same requests, one process, no model."""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
from deepinfer_cache import CacheConfig, CacheGroup, CacheManager
from deepinfer_sched import SchedConfig, Scheduler, Sequence

BLOCK, PAGES, BUDGET, LONGEST = 16, 60_000, 8192, 4096


def make_requests(count: int, outputs: tuple[int, int]) -> list[tuple[list[int], int]]:
    """(prompt, output tokens): groups of 16 requests share 512 tokens, 64 are their own."""
    rng = random.Random(0)
    requests = []
    for number in range(count):
        group = random.Random(number // 16)
        prompt = [group.randrange(49_152) for _ in range(512)] + [rng.randrange(49_152) for _ in range(64)]
        requests.append((prompt, rng.randint(*outputs)))
    return requests


def time_ours(requests: list[tuple[list[int], int]], running: int, steps: int) -> tuple[list[float], int]:
    """Milliseconds of plan + apply of each full step, one step ahead; and the steps that ran."""
    cache = CacheManager(CacheConfig((CacheGroup("kv", "prefix", BLOCK),), PAGES, running, LONGEST, BUDGET))
    scheduler = Scheduler(SchedConfig(running, BUDGET, LONGEST), cache)
    for number, (prompt, output) in enumerate(requests):
        scheduler.add(Sequence(number, list(prompt), output))
    flights: deque[Any] = deque()
    times: list[float] = []
    count = 0
    while scheduler.has_unfinished and len(times) < steps:
        begin = time.perf_counter()
        plan = scheduler.plan()
        spent = time.perf_counter() - begin
        if plan is not None:
            count += 1
            flights.append((plan, np.full((plan.num_rows, 1), 7), plan.samples.astype(np.int64)))
        if plan is None or len(flights) == 2:
            result = flights.popleft()
            begin = time.perf_counter()
            scheduler.apply(*result)
            spent += time.perf_counter() - begin
        if plan is not None and plan.num_rows == running:
            times.append(spent * 1e3)
    return times, count


def make_vllm(running: int) -> tuple[Any, Any]:
    """vLLM's asynchronous scheduler with the same limits, and a function that makes its requests."""
    import torch
    from vllm import SamplingParams
    from vllm.config import CacheConfig as VllmCache
    from vllm.config import DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

    folder = Path(tempfile.mkdtemp())
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 1}
    about = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49_152}
    (folder / "config.json").write_text(json.dumps({**about, **shape, "max_position_embeddings": LONGEST}))
    model = ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=LONGEST)
    limits = SchedulerConfig(
        max_num_seqs=running, max_num_batched_tokens=BUDGET, max_model_len=LONGEST, enable_chunked_prefill=True,
        is_encoder_decoder=False, async_scheduling=True,
    )  # fmt: skip
    memory = VllmCache(block_size=BLOCK, enable_prefix_caching=True)
    config = VllmConfig(
        scheduler_config=limits, model_config=model, cache_config=memory, device_config=DeviceConfig("cpu")
    )
    memory.num_gpu_blocks = PAGES
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.float32)
    kv = KVCacheConfig(num_blocks=PAGES, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    scheduler = AsyncScheduler(config, kv, StructuredOutputManager(config), block_size=BLOCK)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)

    def make_request(number: int, prompt: list[int], output: int) -> Any:
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        return Request(str(number), list(prompt), params, None, block_hasher=hasher)

    return scheduler, make_request


def time_vllm(requests: list[tuple[list[int], int]], running: int, steps: int) -> tuple[list[float], int]:
    """The same for vLLM: schedule + update_from_output, one step ahead."""
    from vllm.v1.outputs import ModelRunnerOutput

    scheduler, make_request = make_vllm(running)
    for number, (prompt, output) in enumerate(requests):
        scheduler.add_request(make_request(number, prompt, output))
    flights: deque[Any] = deque()
    times: list[float] = []
    count = 0
    while (scheduler.has_requests() or flights) and len(times) < steps:
        begin = time.perf_counter()
        output = scheduler.schedule()
        spent = time.perf_counter() - begin
        scheduled = output.num_scheduled_tokens
        if scheduled:
            count += 1
            names = list(scheduled)
            done = [
                scheduler.requests[name].num_computed_tokens >= scheduler.requests[name].num_prompt_tokens
                for name in names
            ]
            sampled = [[7] if finished else [] for finished in done]
            index = {name: place for place, name in enumerate(names)}
            flights.append((output, ModelRunnerOutput(req_ids=names, req_id_to_index=index, sampled_token_ids=sampled)))
        if flights and (not scheduled or len(flights) == 2):
            result = flights.popleft()
            begin = time.perf_counter()
            scheduler.update_from_output(*result)
            spent += time.perf_counter() - begin
        if len(scheduled) == running:
            times.append(spent * 1e3)
    return times, count


def run(argv: list[str]) -> int:
    """Print both schedulers side by side. Returns 1 when this one is slower anywhere."""
    parser = argparse.ArgumentParser(prog="sched-vllm", description=__doc__)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    if importlib.util.find_spec("vllm") is None:
        print(
            "cannot run: vLLM is not installed here (uv run --extra vllm deepinfer bench sched-vllm)", file=sys.stderr
        )
        return 2
    results: dict[str, dict[str, float]] = {}
    for name, outputs, count in (("decode", (2000, 2000), args.running), ("churn", (16, 240), 12 * args.running)):
        requests = make_requests(count, outputs)
        row: dict[str, float] = {}
        for engine, measure in (("deepinfer", time_ours), ("vllm", time_vllm)):
            times, ran = measure(requests, args.running, args.steps)
            row |= {f"{engine}_ms": statistics.median(times), f"{engine}_steps": ran}
        row["ratio"] = row["vllm_ms"] / row["deepinfer_ms"]
        results[name] = row
    if args.json:
        print(json.dumps({"running": args.running, **results}))
    else:
        print(f"plan + apply, median ms of steps with {args.running} running requests, one step ahead, one process")
        for name, row in results.items():
            print(
                f"  {name:8} deepinfer {row['deepinfer_ms']:.3f}   vllm {row['vllm_ms']:.3f}   x{row['ratio']:.1f}   "
                f"(steps until then: {row['deepinfer_steps']} and {row['vllm_steps']})"
            )
    return int(any(row["ratio"] < 1 for row in results.values()))


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
