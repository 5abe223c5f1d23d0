"""Steps without drafts in the simulator: V4-Flash on 4 GPUs (digitised curves), drafts that pay always, sometimes and never.

`plain` never drafts. `planned` drafts in every step and verifies what the planner says, `paused` leaves the drafting out
while it does not pay, as the vLLM adapter does: looks and mistakes may lose a hundredth of the time and a constant, which a
short run shows too. The bar: within 2 % of the better of the two in every load.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import product

import numpy as np
from deepinfer_specdec.simulation.pauses import paused
from deepinfer_specdec.simulation.throughput import (
    Simulated,
    Workload,
    fixed_length,
    planned,
    tokens_per_second,
    v4_flash_draft,
    v4_flash_verify,
)

WIDTH = 7
BAR = 0.98
LOADS: dict[str, dict[str, object]] = {
    "hopeless": {"mean_logit": -2.0},
    "short and poor": {"mean_logit": -2.0, "within": 1.0, "life": 3},
    "poor": {"mean_logit": -0.5, "within": 1.0},
    "very noisy": {"within": 2.0},
    "code and chat": {"kinds": (2.0, -2.0), "within": 0.5},
    "a job": {"kinds": (2.0, -2.0), "within": 0.5, "tokens": 300},
}


def compare(load: Workload, steps: int, seeds: int) -> dict[str, float]:
    """Expected tokens per second by policy, mean over seeds."""
    verify, draft = v4_flash_verify(), v4_flash_draft()

    def mean(policies: list[Simulated]) -> float:
        runs = [tokens_per_second(made, load, verify, WIDTH, steps, seed) for seed, made in enumerate(policies)]
        return float(np.mean(runs))

    return {
        "plain": mean([fixed_length(0, draft) for _ in range(seeds)]),
        "planned": mean([planned(verify, draft, load.rows, WIDTH) for _ in range(seeds)]),
        "paused": mean([paused(verify, draft, load.rows, WIDTH) for _ in range(seeds)]),
    }


def run(argv: list[str]) -> int:
    """Print the table, or JSON lines; 1 if pauses cost more than the bar allows anywhere."""
    parser = argparse.ArgumentParser(prog="specdec-pauses", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--steps", type=int, default=400, help="steps at 64 rows and more; fewer rows run longer")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    if not args.json:
        print("requests         rows    plain  planned   paused | planned/plain paused/plain paused/better")
    kept = True
    for name, rows in product(LOADS, args.rows):
        load = Workload(rows, **LOADS[name])  # type: ignore[arg-type]
        r = compare(load, max(args.steps, min(2000, 20_000 // rows)), args.seeds)
        better = r["paused"] / max(r["plain"], r["planned"])
        kept &= better >= BAR
        if args.json:
            print(json.dumps({"load": name, "rows": rows, **r}), flush=True)
            continue
        print(f"{name:16} {rows:4} {r['plain']:8.0f} {r['planned']:8.0f} {r['paused']:8.0f} |", end=" ")
        print(f"{r['planned'] / r['plain']:13.4f} {r['paused'] / r['plain']:12.4f} {better:13.4f}", end="")
        print("" if better >= BAR else "  missed", flush=True)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
