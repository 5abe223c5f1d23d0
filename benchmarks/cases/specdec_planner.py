"""What speculation's scheduler takes of a step, at 256 requests x 7 drafts: the code that the engines run. Bar: 300 us.

ahead        native engine, loop that runs ahead: confidences of a block scaled and recorded, then the next budget, with
             step prices that go on being learned
synchronous  native engine, drafts that pass through the host: prices, survivals corrected by what was kept, budget and
             lengths in one sort, then what became of them taken in
vllm         inside vLLM: confidences recorded, then the budget by its profile's curve
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
from deepinfer_specdec import Draft, VerificationPlanner
from deepinfer_specdec.scheduling.budget import StepLoad
from deepinfer_specdec.scheduling.calibration import TemperatureScaling
from deepinfer_specdec.scheduling.choice import choose, round_sizes
from deepinfer_specdec.scheduling.costs import StepCosts
from deepinfer_specdec.scheduling.hopes import Hopes
from deepinfer_specdec.scheduling.worth import token_worth
from deepinfer_specdec.simulation.throughput import v4_flash_draft, v4_flash_verify

BAR = 300.0  # microseconds, at 256 x 7
BLOCKS = 64  # different ones, in turn
EDGE = 0.02  # as in the native engine

Step = Callable[[int], object]


def median_us(call: Step, repeats: int = 300) -> tuple[float, float]:
    """(median, 90th percentile) microseconds of `call(step)`; 50 calls of warm-up."""
    for step in range(50):
        call(step)
    times = []
    for step in range(50, 50 + repeats):
        begin = time.perf_counter()
        call(step)
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times), sorted(times)[int(0.9 * repeats)]


def ahead(rows: int, width: int, logits: np.ndarray) -> Step:
    """`deepinfer_offline.engine.native.ahead_drafts`: what it calls when a step has landed and the next one is planned."""
    planner, costs, slots = VerificationPlanner(rows, width, EDGE), StepCosts(), np.arange(rows)
    scaling, most, verify = TemperatureScaling.identity(width), np.full(rows, width, np.int32), v4_flash_verify()
    costs.observe_ahead(rows, float(verify.seconds(rows)))

    def step(number: int) -> int:
        planner.record(number, slots, scaling.survival(logits[number % BLOCKS]))
        seconds = costs.alone(rows) + costs.extra(rows, rows * width)
        budget = planner.budget(number + 2, slots, seconds, counts=most)
        costs.observe(rows, budget, float(verify.seconds(rows + budget)))
        return budget

    return step


def synchronous(rows: int, width: int, logits: np.ndarray) -> Step:
    """`deepinfer_offline.engine.native.speculation`: what it calls between two steps, but for the drafter."""
    costs, hopes, verify = StepCosts(), Hopes(), v4_flash_verify()
    costs.observe_ahead(rows, float(verify.seconds(rows)))
    ids, counts = np.zeros((rows, width), np.int32), np.full(rows, width, np.int32)
    confidences = (1.0 / (1.0 + np.exp(-logits))).astype(np.float32)
    left = np.linspace(10, 200, rows)

    def step(number: int) -> int:
        survivals = Draft(ids, counts, confidences[number % BLOCKS]).survivals()
        worth = token_worth(left, costs.fixed_share(rows))
        seconds = costs.synchronous(rows, rows * width)
        choice = choose(hopes.believed(survivals) * worth[:, None], counts, seconds, EDGE, round_sizes)
        hopes.settle(survivals, worth, choice.lengths, choice.lengths // 2)
        costs.observe(rows, choice.budget, float(verify.seconds(rows + choice.budget)))
        return choice.budget

    return step


def vllm(rows: int, width: int, logits: np.ndarray) -> Step:
    """`deepinfer_specdec.adapters.vllm.verification`: what it calls on the host."""
    planner, slots, verify = VerificationPlanner(rows, width), np.arange(rows), v4_flash_verify()
    confidences = (1.0 / (1.0 + np.exp(-logits))).astype(np.float32)
    counts, drafting = np.full(rows, width, np.int32), float(v4_flash_draft().seconds(rows))

    def step(number: int) -> int:
        planner.record(number, slots, np.cumprod(confidences[number % BLOCKS], axis=1))
        load = StepLoad(rows, draft_seconds=drafting, limit=rows * width)
        return planner.budget(number + 2, slots, load.seconds(verify, load.limit), rows, counts)

    return step


def measure(rows: int, width: int) -> dict[str, tuple[float, float]]:
    """Times of a step of each engine. Each step drafts other confidences."""
    logits = np.random.default_rng(0).normal(0.9, 1.0, (BLOCKS, rows, width)).astype(np.float32)
    return {make.__name__: median_us(make(rows, width, logits)) for make in (ahead, synchronous, vllm)}


def run(argv: list[str]) -> int:
    """Print the table, or one JSON object; 1 if a step takes more than the bar."""
    parser = argparse.ArgumentParser(
        prog="specdec-planner", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
            print(f"  {name:12} median {median:7.1f}   p90 {high:7.1f}")
    return 0 if max(median for median, _ in result.values()) <= BAR else 1


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
