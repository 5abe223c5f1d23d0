"""Planning a whole job: 1,000,000 requests of 2,000 tokens. Bars: 60 s, 2 GB."""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Iterator

import numpy as np
from deepinfer_sched import plan_job

BAR_SECONDS, BAR_BYTES = 60.0, 2e9


def requests(count: int, tokens: int, groups: int) -> Iterator[np.ndarray]:
    """Half of each prompt is shared within its group; groups are interleaved. Made on the fly, nothing is kept."""
    rng = np.random.default_rng(0)
    half = tokens // 2
    shared = rng.integers(0, 129_280, (groups, half), dtype=np.int32)
    own = rng.integers(0, 129_280, tokens - half, dtype=np.int32)
    for number in range(count):
        tail = own.copy()
        tail[0], tail[1] = number % 100_000, number // 100_000
        yield np.concatenate([shared[number * 7919 % groups], tail])


def run(argv: list[str]) -> int:
    """Print seconds and peak memory of this process. Returns 1 when a bar is missed."""
    parser = argparse.ArgumentParser(prog="sched-plan-job", description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=2_000)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--groups", type=int, default=1_000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    begin = time.perf_counter()
    plan = plan_job(requests(args.requests, args.tokens, args.groups), block_size=args.block_size)
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    result = {"requests": len(plan.order), "seconds": seconds, "peak_bytes": peak, "bound": plan.bound}
    if args.json:
        print(json.dumps(result))
    else:
        print(
            f"{args.requests:,} requests of {args.tokens:,} tokens, blocks of {args.block_size}: {seconds:.1f} s "
            f"(making the tokens included; bar {BAR_SECONDS:.0f} s), peak {peak / 1e9:.2f} GB (bar 2 GB), bound {plan.bound:.1%}"
        )
    return int(seconds > BAR_SECONDS or peak > BAR_BYTES)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
