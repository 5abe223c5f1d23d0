"""Scheduler cost of speculation per step: plan and admission at 256 requests x 7 drafts. Bar: 300 us."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
from deepinfer_specdec import Draft, VerificationPlanner
from deepinfer_specdec.scheduling.budget import StepLoad, expected_tokens, live_budget, lookahead_budget
from deepinfer_specdec.simulation.throughput import v4_flash_draft, v4_flash_verify

BAR = 300.0  # microseconds, at 256 x 7


def median_us(call: Callable[[int], object], repeats: int = 300) -> tuple[float, float]:
    """(median, 90th percentile) microseconds of `call(step)`; 50 calls of warm-up."""
    for step in range(50):
        call(step)
    times = []
    for step in range(50, 50 + repeats):
        begin = time.perf_counter()
        call(step)
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times), sorted(times)[int(0.9 * repeats)]


def measure(rows: int, width: int) -> dict[str, tuple[float, float]]:
    """Times of the parts of a step. Each step drafts other confidences."""
    rng = np.random.default_rng(0)
    levels = rng.normal(0.9, 1.0, (64, rows, width))
    confidences = (1.0 / (1.0 + np.exp(-levels))).astype(np.float32)
    ids, counts = np.zeros((rows, width), dtype=np.int32), np.full(rows, width, dtype=np.int32)
    drafts = [Draft(ids, counts, block) for block in confidences]
    survivals = [draft.survivals() for draft in drafts]
    verify, draft_curve = v4_flash_verify(), v4_flash_draft()
    planner = VerificationPlanner(rows, width, verify, draft_curve)
    slots = np.arange(rows)
    forecast = expected_tokens(survivals[0])
    load = StepLoad(rows, draft_seconds=0.005)

    def whole(step: int) -> object:
        plan = planner.plan(step, slots)
        return planner.admit(step, slots, drafts[step % 64], plan.budget)

    return {
        "asynchronous: plan + admit": median_us(whole),
        "synchronous: lookahead budget": median_us(
            lambda s: lookahead_budget(survivals[s % 64], forecast, load, verify)
        ),
        "deterministic: live budget": median_us(lambda s: live_budget(survivals[s % 64], load, verify)),
    }


def run(argv: list[str]) -> int:
    """Print the table, or one JSON object; 1 if a step takes more than the bar."""
    parser = argparse.ArgumentParser(prog="specdec-planner", description=__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--width", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    result = measure(args.rows, args.width)
    if args.json:
        print(json.dumps({name: {"median_us": m, "p90_us": p} for name, (m, p) in result.items()}))
    else:
        print(f"{args.rows} requests x {args.width} drafts, microseconds per step")
        for name, (median, high) in result.items():
            print(f"  {name:32} median {median:7.1f}   p90 {high:7.1f}")
    return 0 if max(median for median, _ in result.values()) <= BAR else 1


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
