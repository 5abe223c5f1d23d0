"""A trace through the real scheduler and cache under a cost model: hit rate, steps, time, memory, per policy."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from deepinfer_cache import CacheConfig, CacheGroup, CacheManager
from deepinfer_offline.planning.trace import read_trace
from deepinfer_sched import CostModel, SchedConfig, SimulationReport, plan_blocks, simulate
from deepinfer_sched.simulation.replay import trace_requests

POLICIES = (("arrival", "lru"), ("planned", "lru"), ("planned", "next-use"))


def simulate_policy(args: argparse.Namespace, order: str, eviction: str) -> SimulationReport:
    """One policy over the first `args.requests` requests of the trace."""
    trace = read_trace(args.trace)
    rows = list(islice(zip(trace.blocks, trace.tokens, trace.outputs, strict=True), args.requests))
    if order == "planned":
        plan = plan_blocks([row[0] for row in rows], block_size=args.block_size, outputs=[row[2] for row in rows])
        rows = [rows[i] for i in plan.order]
    longest = max(tokens + outputs for _, tokens, outputs in rows) + args.block_size
    config = SchedConfig(args.running, args.budget, longest)
    cache = CacheManager(
        CacheConfig(
            (CacheGroup("kv", "prefix", args.block_size),), args.cache_blocks, args.running, longest,
            max_tokens_per_step=args.budget, eviction=eviction,
        )
    )  # fmt: skip
    blocks, tokens, outputs = zip(*rows, strict=True)
    return simulate(trace_requests(blocks, tokens, outputs, args.block_size), cache, config, CostModel())


def run(argv: list[str]) -> int:
    """Print one row a policy."""
    parser = argparse.ArgumentParser(prog="sched-simulate", description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--block-size", type=int, default=512)
    parser.add_argument("--cache-blocks", type=int, default=1_000)
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--budget", type=int, default=8_192)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    reports = {f"{order}, {eviction}": simulate_policy(args, order, eviction) for order, eviction in POLICIES}
    if args.json:
        print(json.dumps({name: {**asdict(report), "hit_rate": report.hit_rate} for name, report in reports.items()}))
        return 0
    print(
        f"{args.requests:,} requests, {args.cache_blocks:,} blocks of {args.block_size} tokens; seconds by the cost model"
    )
    for name, report in reports.items():
        print(
            f"  {name:18} hits {report.hit_rate:6.1%}  steps {report.steps:7,}  {report.seconds:9,.0f} s  "
            f"prompt tokens computed {report.computed_tokens:12,}  peak {report.peak_pages:6,} blocks  "
            f"preempted {report.preemptions:5,}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
