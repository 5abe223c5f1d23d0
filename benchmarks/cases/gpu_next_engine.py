"""The native engine's V4.1 slice (`gpu_engine_v41.py`) in one process under several ways to launch: which one is to be kept.

Ways with the same kernels must give the same greedy tokens: only their overlap differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import deepinfer_kernels_cuda as kernels
import torch
from deepinfer_kernels_cuda import experts, mhc, overlap
from gpu_engine import make_requests, run_job  # pyrefly: ignore
from gpu_engine_v41 import PREFILL, SLICE, build, check_logits, decode, few_layers, prefill_profile  # pyrefly: ignore


@dataclass(frozen=True)
class Way:
    """How kernels are launched.

    Attributes:
        name: printed.
        mode: `overlap.MODE`.
        aside: whether decode steps have a branch.
        pairs: `experts.DECODE_ONCE_PAIRS`.
        chunk: tokens of a hyper-connection pass at prefill; 0 takes all at once.
        beside: whether its projection runs on a stream of its own.
    """

    name: str
    mode: int = overlap.DRAIN
    aside: bool = False
    pairs: int = 64
    chunk: int = 0
    beside: bool = False


NEVER = 1 << 30
WAYS = (
    Way("as before", overlap.OFF, pairs=NEVER),
    Way("off, decode_once", overlap.OFF),
    Way("drain"),
    Way("drain, aside", aside=True),
    Way("early, aside", overlap.EARLY, aside=True),
    Way("drain, chunks of 1024", chunk=1024),
    Way("drain, chunks of 1024 beside", chunk=1024, beside=True),
)


def take(way: Way, engine: Any, kept: Callable[..., Any]) -> None:
    """Switch the engine over; what was captured is captured again."""
    from gpu_next import mhc_chunked  # pyrefly: ignore

    overlap.MODE, experts.DECODE_ONCE_PAIRS = way.mode, way.pairs
    runner = engine._parts.runner
    runner.model.backbone.aside.enabled = way.aside and torch.cuda.is_available()
    if runner._graphs is not None:
        torch.cuda.synchronize()
        runner._graphs._captured.clear()
        runner._graphs._pool = None
    side = torch.cuda.Stream() if way.beside else None

    def step(streams: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if not way.chunk or streams.shape[0] <= mhc._ONE_PASS_TOKENS or options.get("output") is None:
            return kept(streams, *arguments, **options)
        return mhc_chunked(streams, *arguments, chunk=way.chunk, side=side, **options)

    kernels.mhc_step = step  # pyrefly: ignore


def measure(engine: Any, count: int, context: int, steps: int, profiled: int) -> str:
    """Milliseconds of a decode step, its idle share, and prompt tokens a second."""
    decode(engine, count, context, 3, 0)  # compiles and captures
    line = decode(engine, count, context, steps, profiled)
    rate = line["prefill_tokens_per_s"]
    return (
        f"{count:3d}: step {line['step_ms']:.3f} ms, busy {line['busy_ms']:.3f}, idle {line['idle']:.4f}, under the profiler "
        f"{line['idle_profiled']:.4f}; prefill {rate:,} tokens/s ({rate / PREFILL:.3f})"
    )


def dry_run() -> int:
    """Everything but the measurements, on a CPU: a tiny model of the same kind, every way, equal tokens."""
    small = {"vocab_size": 1000, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 64, "qk_rope_head_dim": 16,
             "q_lora_rank": 32, "o_groups": 2, "o_lora_rank": 16, "index_n_heads": 2, "index_head_dim": 32, "n_routed_experts": 8,
             "moe_intermediate_size": 32, "sliding_window": 16, "index_topk": 16}  # fmt: skip
    config = few_layers()
    config = config | {"text_config": config["text_config"] | small}
    engine = build(config, device="cpu", dtype="float32", max_running=4, max_tokens_per_step=128, kv_memory=64 << 20,
                   max_model_len=256)  # fmt: skip
    print(type(engine._parts.runner.model.backbone).__name__)
    print(len(run_job(engine, make_requests(3, 40, 5, 900))[1]), "answers")
    return 0


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
    parser.add_argument("--dry-run", action="store_true", help="on a CPU: imports, arguments and a tiny model")
    asked = parser.parse_args(argv)
    if asked.dry_run:
        torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
        return dry_run()
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
    kept = kernels.mhc_step
    expected: dict[Any, Any] = {}  # ways that sum in another order have an answer of their own
    for number in asked.ways:
        way, start = WAYS[number], time.perf_counter()
        if start - begin > asked.seconds:
            print(f"no time for {way.name}")
            continue
        try:
            take(way, engine, kept)
            answers = run_job(engine, make_requests(8, 300, 24, 129000))[1]
            engine._stats.computed_prompt_tokens = 0
            first = expected.setdefault((way.pairs, way.chunk), answers)
            same = sum(answers[name] == first[name] for name in first)
            wrong += same < len(first)
            alone = " (the first of its kind)" if first is answers else ""
            print(f"{way.name}: {same} of {len(first)} answers as before{alone}", flush=True)
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
    import gpu_engine_v41  # noqa: F401  # pyrefly: ignore

    raise SystemExit(run(sys.argv[1:]))
