"""The native engine's V4.1 slice (`gpu_engine_v41.py`) in one process under several ways to launch: which one is to be kept.

Ways with the same kernels must give the same greedy tokens: only their overlap differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from deepinfer_kernels_cuda import overlap
from gpu_engine import make_requests, run_job  # pyrefly: ignore
from gpu_engine_v41 import PREFILL, SLICE, build, check_logits, decode, prefill_profile  # pyrefly: ignore


@dataclass(frozen=True)
class Way:
    """How kernels are launched.

    Attributes:
        name: printed.
        mode: `overlap.MODE`.
        aside: whether decode steps have a branch.
    """

    name: str
    mode: int = overlap.DRAIN
    aside: bool = False


WAYS = (
    Way("off", overlap.OFF),
    Way("drain"),
    Way("drain, aside", aside=True),
    Way("early, aside", overlap.EARLY, aside=True),
)


def take(way: Way, engine: Any) -> None:
    """Switch the engine over; what was captured is captured again."""
    overlap.MODE = way.mode
    runner = engine._parts.runner
    runner.model.backbone.aside.enabled = way.aside
    if runner._graphs is not None:
        torch.cuda.synchronize()
        runner._graphs.decodes._captured.clear()


def measure(engine: Any, count: int, context: int, steps: int, profiled: int) -> str:
    """Milliseconds of a decode step, its idle share, and prompt tokens a second."""
    decode(engine, count, context, 3, 0)  # compiles and captures
    line = decode(engine, count, context, steps, profiled)
    rate = line["prefill_tokens_per_s"]
    return (
        f"{count:3d}: step {line['step_ms']:.3f} ms, busy {line['busy_ms']:.3f}, idle {line['idle']:.4f}, under the profiler "
        f"{line['idle_profiled']:.4f}; prefill {rate:,} tokens/s ({rate / PREFILL:.3f})"
    )


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--counts", type=int, nargs="*", default=[64, 8])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--ways", type=int, nargs="*", default=list(range(len(WAYS))), help="numbers in the list of ways"
    )
    parser.add_argument("--step-tokens", type=int, default=16384)
    parser.add_argument("--profile", type=int, nargs="*", default=[], help="ways whose prefill is printed by kernel")
    parser.add_argument(
        "--check", nargs="*", default=[], help="only compare logits with the portable ops, in these dtypes"
    )
    parser.add_argument("--check-length", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=90, help="no further way is begun after so many")
    asked = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.stderr.write("no CUDA device\n")
        return 2
    if asked.check:
        for dtype in asked.check:
            print(check_logits(dtype, asked.check_length), flush=True)
        return 0
    begin, wrong = time.perf_counter(), 0
    engine = build(
        SLICE, dtype="bfloat16", max_running=max(asked.counts), max_tokens_per_step=asked.step_tokens, kv_memory=8 << 30,
        max_model_len=asked.context + 512,
    )  # fmt: skip
    print(f"loaded in {time.perf_counter() - begin:.1f} s", flush=True)
    expected: dict[str, list[int]] = {}
    for number in asked.ways:
        way, start = WAYS[number], time.perf_counter()
        if start - begin > asked.seconds:
            print(f"no time for {way.name}")
            continue
        try:
            take(way, engine)
            answers = run_job(engine, make_requests(8, 300, 24, 129000))[1]
            engine._stats.computed_prompt_tokens = 0
            expected = expected or answers
            same = sum(answers[name] == expected[name] for name in expected)
            wrong += same < len(expected)
            print(f"{way.name}: {same} of {len(expected)} answers as those of the first way", flush=True)
            for count in asked.counts:
                print("   ", measure(engine, count, asked.context, asked.steps, 8), flush=True)
            if number in asked.profile:
                print("\n".join(prefill_profile(engine, 16, asked.context)))
        except Exception as failure:
            wrong += 1
            print(f"{way.name}: FAILED {type(failure).__name__}: {str(failure)[:300]}", flush=True)
            if "CUDA" in str(failure):
                return 1  # the context is gone
        print(f"    {time.perf_counter() - start:.1f} s", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:]))
