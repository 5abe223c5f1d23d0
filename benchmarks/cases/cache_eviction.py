"""Cost of one eviction with 1,000,000 cached blocks, LRU and next-use, against 10,000 blocks."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time

from deepinfer_cache.eviction import LruEvictor, NextUseEvictor


def measure(blocks: int, turns: int, policy: str) -> float:
    """Microseconds of one turn: evict a block, move its next use, bring it back, take another one out and put it back."""
    rng = random.Random(0)
    keys = [number.to_bytes(16, "little") for number in range(blocks)]
    evictor = LruEvictor() if policy == "lru" else NextUseEvictor()
    uses = [rng.randrange(blocks) for _ in range(blocks)]
    if isinstance(evictor, NextUseEvictor):
        for key, use in zip(keys, uses, strict=True):
            evictor.expect([key], use)
    for page, key in enumerate(keys):
        evictor.add(page, key)
    picks = [rng.randrange(blocks) for _ in range(turns)]
    begin = time.perf_counter()
    for turn, pick in enumerate(picks):
        page = evictor.pop()
        if isinstance(evictor, NextUseEvictor):
            evictor.meet([keys[page]], uses[page])
            uses[page] = picks[-turn - 1]
            evictor.expect([keys[page]], uses[page])
        evictor.add(page, keys[page])
        if pick != page:
            evictor.remove(pick)
            evictor.add(pick, keys[pick])
    return (time.perf_counter() - begin) / turns * 1e6


def run(argv: list[str]) -> int:
    """Print microseconds per turn. Returns 1 when a hundred times the blocks cost over ten times as much: a
    search would cost a hundred times as much, memory that no longer fits the processor's cache five times."""
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
        print("evict + move a use + add + remove + add, microseconds per turn, one thread")
        for policy, row in results.items():
            small, large = row.values()
            print(
                f"  {policy:9} {sizes[0]:>9,} blocks {small:6.2f}   {sizes[1]:>9,} blocks {large:6.2f}   x{large / small:.2f}"
            )
    return int(any(large > 10 * small for small, large in (row.values() for row in results.values())))


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
