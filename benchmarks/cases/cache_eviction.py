"""Cost of one eviction with 1,000,000 cached blocks, LRU and next-use, against 10,000 blocks."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time

from deepinfer_cache.eviction import LruEvictor, NextUseEvictor


def measure(blocks: int, turns: int, policy: str) -> float:
    """Microseconds of one turn: evict a block, announce a use, bring a block back, take another one out by name."""
    rng = random.Random(0)
    keys = [number.to_bytes(16, "little") for number in range(blocks)]
    evictor = LruEvictor() if policy == "lru" else NextUseEvictor()
    if isinstance(evictor, NextUseEvictor):
        for key in keys:
            evictor.expect([key], rng.randrange(blocks))
    for page, key in enumerate(keys):
        evictor.add(page, key)
    picks = [rng.randrange(blocks) for _ in range(turns)]
    begin = time.perf_counter()
    for turn, pick in enumerate(picks):
        page = evictor.pop()
        if isinstance(evictor, NextUseEvictor):
            evictor.expect([keys[page]], blocks + turn % 1000)
        evictor.add(page, keys[page])
        if pick != page:
            evictor.remove(pick)
            evictor.add(pick, keys[pick])
    return (time.perf_counter() - begin) / turns * 1e6


def run(argv: list[str]) -> int:
    """Print microseconds per turn. Returns 1 when a hundred times the blocks cost more than five times as much."""
    parser = argparse.ArgumentParser(prog="cache-eviction", description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--turns", type=int, default=200_000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    sizes = (max(args.blocks // 100, 1), args.blocks)
    results = {
        policy: {str(blocks): measure(blocks, args.turns, policy) for blocks in sizes} for policy in ("lru", "next-use")
    }
    if args.json:
        print(json.dumps({"unit": "microseconds per turn", **results}))
    else:
        print("evict + announce + add + remove + add, microseconds per turn, one thread")
        for policy, row in results.items():
            small, large = row.values()
            print(
                f"  {policy:9} {sizes[0]:>9,} blocks {small:6.2f}   {sizes[1]:>9,} blocks {large:6.2f}   x{large / small:.2f}"
            )
    return int(any(large > 5 * small for small, large in (row.values() for row in results.values())))


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
