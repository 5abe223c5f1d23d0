"""Cost of planning and applying one step with 256 running requests, no model. Bar: 1.0 ms median."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import deque

import numpy as np
from deepinfer_cache import CacheConfig, CacheGroup, CacheManager
from deepinfer_sched import SchedConfig, Scheduler, Sequence, StepPlan

BAR_MS = 1.0


def make_scheduler(running: int, budget: int = 8192, pages: int = 60_000) -> Scheduler:
    """A scheduler with room for everything, as on a large device."""
    cache = CacheManager(
        CacheConfig((CacheGroup("kv", "prefix", 16),), pages, running, 4096, max_tokens_per_step=budget)
    )
    return Scheduler(SchedConfig(running, budget, 4096), cache)


def add_requests(scheduler: Scheduler, count: int, outputs: tuple[int, int], shared: int = 512, own: int = 64) -> None:
    """Requests in groups of 16 with a common prefix of `shared` tokens and `own` tokens each."""
    rng = random.Random(0)
    for number in range(count):
        group = random.Random(number // 16)
        prompt = [group.randrange(49_152) for _ in range(shared)] + [rng.randrange(49_152) for _ in range(own)]
        scheduler.add(Sequence(number, prompt, rng.randint(*outputs)))


def replay(scheduler: Scheduler, ahead: int, steps: int, running: int) -> list[float]:
    """Run the loop; milliseconds of plan + apply of each step that had `running` requests."""
    flights: deque[tuple[StepPlan, np.ndarray, np.ndarray]] = deque()
    ids = np.random.default_rng(0).integers(1, 49_152, (1024, running, 1))
    times: list[float] = []
    while scheduler.has_unfinished and len(times) < steps:
        begin = time.perf_counter()
        plan = scheduler.plan()
        if plan is not None:
            flights.append((plan, ids[plan.step % 1024, : plan.num_rows], plan.samples.astype(np.int64)))
        if len(flights) == ahead or plan is None:
            scheduler.apply(*flights.popleft())
        if plan is not None and plan.num_rows == running:
            times.append((time.perf_counter() - begin) * 1e3)
    return times


def measure(running: int, ahead: int, steps: int) -> dict[str, dict[str, float]]:
    """Steady decode (nobody comes or goes) and churn (somebody finishes and is replaced in most steps)."""
    results = {}
    for name, outputs, count in (("decode", (2000, 2000), running), ("churn", (16, 240), 16 * running)):
        scheduler = make_scheduler(running)
        add_requests(scheduler, count, outputs)
        times = replay(scheduler, ahead, steps, running)
        results[name] = {
            "steps": len(times),
            "median_ms": statistics.median(times),
            "p99_ms": sorted(times)[int(0.99 * len(times))],
        }
    return results


def run(argv: list[str]) -> int:
    """Print milliseconds per step. Returns 1 when a median is above the bar."""
    parser = argparse.ArgumentParser(prog="sched-step", description=__doc__)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--ahead", type=int, default=2, help="steps in flight: 1 synchronous, 2 one step ahead")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    results = measure(args.running, args.ahead, args.steps)
    if args.json:
        print(json.dumps({"running": args.running, "ahead": args.ahead, "bar_ms": BAR_MS, **results}))
    else:
        print(
            f"plan + apply, {args.running} running requests, {args.ahead} steps in flight, one thread; bar {BAR_MS} ms"
        )
        for name, row in results.items():
            print(f"  {name:8} median {row['median_ms']:.3f} ms   p99 {row['p99_ms']:.3f} ms   ({row['steps']} steps)")
    return int(any(row["median_ms"] > BAR_MS for row in results.values()))


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
