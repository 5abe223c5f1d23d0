"""The native engine on one CUDA device: SmolLM2's shape, 1,000 requests of 512 in and 128 out, random weights.

Prints output tokens a second for several sizes of the running batch, the share of steady decode in which the device idles
(from the union of kernel intervals, against the device's own clock and under the profiler), time by kernel and by gap, and
whether greedy float32 answers equal those of the portable ops on the same device. Peer on such a card (2026-11-29, vLLM
0.33.0): 14,059 output tokens/s on this job.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepinfer_offline.engine.base import Request
from deepinfer_offline.engine.native.build import build_native
from deepinfer_offline.engine.options import EngineOptions
from deepinfer_offline.models.llama.config import LlamaConfig
from deepinfer_offline.models.llama.weights import expected_shapes
from deepinfer_offline.ops.registry import registry
from deepinfer_offline.sampling import SamplingParams
from gpu_engine_idle import by_gap, by_kernel, idle_share, kernel_intervals, steady  # pyrefly: ignore

PEER_TOKENS = 14_059
BAR_TOKENS = 28_000
BAR_IDLE = 0.02

SMOLLM2: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_theta": 100000,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}


class RandomLlama:
    """A checkpoint source whose tensors are drawn when they are read: norms 1, everything else small."""

    name, path = "random-llama", Path("random-llama")

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.model_type = str(config["model_type"])
        self.shapes = expected_shapes(LlamaConfig.parse(config))

    def open(self) -> RandomLlama:
        return self

    def read(self, name: str) -> torch.Tensor:
        shape = self.shapes[name]
        if len(shape) == 1:
            return torch.ones(shape)
        generator = torch.Generator().manual_seed(sum(map(ord, name)) * 7919)
        scale = 1.0 if name.startswith("model.embed") else shape[-1] ** -0.5
        return torch.randn(shape, generator=generator) * scale

    def close(self) -> None:
        """Nothing is open."""


def make_requests(count: int, prompt: int, answer: int, vocab: int, **params: Any) -> list[Request]:
    rng = np.random.default_rng(0)
    settings: dict[str, Any] = {"temperature": 0} | params
    wanted = SamplingParams(max_tokens=answer, ignore_eos=True, **settings)
    return [Request(f"r{i}", rng.integers(10, vocab, prompt).tolist(), wanted) for i in range(count)]


def run_job(engine: Any, requests: list[Request]) -> tuple[float, dict[str, list[int]]]:
    """Seconds from the first request to the last answer, and the answers."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for request in requests:
        engine.add_request(request)
    answers: dict[str, list[int]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            if output.error is not None:
                raise output.error
            answers[output.request_id] = list(output.outputs[0].token_ids)
    return time.perf_counter() - start, answers


def build(config: Mapping[str, Any], *, portable: bool = False, **options: Any) -> Any:
    """An engine on random weights; `portable` leaves the kernels out."""
    hidden = _hide_kernels() if portable else None
    try:
        settings: dict[str, Any] = {"device": "cuda"} | options
        chosen = EngineOptions(engine="native", enable_prefix_caching=False, **settings)
        source: Any = RandomLlama(config)
        return build_native(chosen, source, None)
    finally:
        if hidden is not None:
            registry._providers = hidden


def _hide_kernels() -> Any:
    kept = registry._providers
    registry._providers = {op: [p for p in found if p.band == "portable"] for op, found in kept.items()}
    return kept


def profile_decode(engine: Any, requests: list[Request], steps: int) -> dict[str, Any]:
    """Figures of `steady` decode with every request running, and its kernels and gaps."""
    for request in requests:
        engine.add_request(request)
    while engine.stats().running < len(requests) or engine.stats().waiting:
        engine.step()
    for _ in range(6):
        engine.step()
    found, intervals = steady(engine, steps, steps)
    for request in requests:
        engine.abort(request.request_id)
    while engine.has_unfinished():
        engine.step()
    return found | {"kernels": [*by_kernel(intervals, steps), *by_gap(intervals, steps)]}


def measure_prompts(step_tokens: int, count: int) -> dict[str, Any]:
    """Prompts of 512 tokens with one token of answer each: ms a step of `step_tokens`, and how much of it kernels take."""
    from torch.profiler import ProfilerActivity, profile

    engine = build(
        SMOLLM2,
        dtype="bfloat16",
        max_running=1000,
        max_tokens_per_step=step_tokens,
        kv_memory=30 << 30,
        max_model_len=2048,
    )
    requests = make_requests(count, 512, 1, SMOLLM2["vocab_size"])
    steps = count * 512 / step_tokens
    first = run_job(engine, requests)[0]
    seconds = min(run_job(engine, requests)[0] for _ in range(3))
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run_job(engine, requests)
    engine.close()
    intervals = kernel_intervals(profiler)
    busy = (intervals[-1][1] - intervals[0][0]) / 1e6 * (1 - idle_share(intervals))
    return {
        "step_tokens": step_tokens,
        "first_s": round(first, 2),
        "step_ms": round(seconds * 1e3 / steps, 3),
        "busy_ms": round(busy / steps, 3),
        "idle": round(1 - busy / (seconds * 1e3), 4),
        "prompt_tokens_per_s": round(count * 512 / seconds),
        "kernels": list(by_kernel(intervals, round(steps))),
    }


def check_tokens(layers: int) -> dict[str, Any]:
    """Greedy answers in float32 with and without the kernels; of all lengths, so that steps of many sizes are captured between
    others.
    """
    config = SMOLLM2 | {"num_hidden_layers": layers}
    rng, requests = np.random.default_rng(0), []
    for number in range(48):
        prompt = rng.integers(10, config["vocab_size"], 1 + 97 * number % 140).tolist()
        wanted = SamplingParams(temperature=0, max_tokens=8 + 29 * number % 64, ignore_eos=True)
        requests.append(Request(f"r{number}", prompt, wanted))
    fast, slow = (
        build(config, portable=portable, dtype="float32", max_running=16, max_tokens_per_step=256, kv_memory=1 << 30)
        for portable in (False, True)
    )
    found, expected = run_job(fast, requests)[1], run_job(slow, requests)[1]
    fast.close()
    slow.close()
    same = sum(a == b for name in expected for a, b in zip(found[name], expected[name], strict=True))
    return {"answers": len(requests), "equal": sum(found[n] == expected[n] for n in expected), "tokens_equal": same}


def measure(running: int, step_tokens: int, count: int, profile_host: bool) -> dict[str, Any]:
    engine = build(
        SMOLLM2, dtype="bfloat16", max_running=running, max_tokens_per_step=step_tokens, kv_memory=30 << 30,
        max_model_len=2048,
    )  # fmt: skip
    requests = make_requests(count, 512, 128, SMOLLM2["vocab_size"])
    start = time.perf_counter()
    cold, _ = run_job(engine, requests)
    seconds, answers = run_job(engine, requests)
    again, repeated = run_job(engine, requests)
    best = min(seconds, again)
    line = {
        "running": running,
        "step_tokens": step_tokens,
        "first_s": round(cold, 2),
        "seconds": round(seconds, 3),
        "again_s": round(again, 3),
        "tokens_per_s": round(count * 128 / best),
        "repeatable": answers == repeated,
    }
    if profile_host:
        profiler = cProfile.Profile()
        profiler.enable()
        run_job(engine, requests)
        profiler.disable()
        pstats.Stats(profiler, stream=sys.stdout).sort_stats("tottime").print_stats(16)
        sampled = make_requests(count, 512, 128, SMOLLM2["vocab_size"], temperature=0.8)
        run_job(engine, sampled)
        line["sampled_tokens_per_s"] = round(count * 128 / run_job(engine, sampled)[0])
    line |= profile_decode(engine, requests[:running], 12)  # few, for attention takes a step more beyond 576 keys
    engine.close()
    line["total_s"] = round(time.perf_counter() - start, 1)
    return line


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--running", type=int, nargs="*", default=[256, 512, 1000])
    parser.add_argument("--step-tokens", type=int, default=16384)
    parser.add_argument("--prompts", action="store_true", help="measure steps of prompts alone too")
    parser.add_argument("--host", action="store_true", help="profile the loop, and measure a sampled job")
    parser.add_argument(
        "--check-layers", type=int, default=4, help="layers of the model that answers are compared on; 0 skips"
    )
    asked = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.stderr.write("no CUDA device\n")
        return 2
    lines = []
    checked = check_tokens(asked.check_layers) if asked.check_layers else None
    if checked and not asked.json:
        sys.stdout.write(f"float32 greedy, kernels against portable ops: {checked}\n")
    prompts = measure_prompts(asked.step_tokens, asked.requests) if asked.prompts else None
    if prompts and not asked.json:
        sys.stdout.write(
            f"{ {k: v for k, v in prompts.items() if k != 'kernels'} }\n" + "\n".join(prompts["kernels"]) + "\n"
        )
    for running in asked.running:
        line = measure(running, asked.step_tokens, asked.requests, asked.host)
        lines.append(line)
        if not asked.json:
            kernels = line["kernels"]
            sys.stdout.write(f"{ {k: v for k, v in line.items() if k != 'kernels'} }\n" + "\n".join(kernels) + "\n")
            sys.stdout.flush()
        torch.cuda.empty_cache()
    best = max((line["tokens_per_s"] for line in lines), default=0)
    found = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "checked": checked,
        "prompts": prompts,
        "tokens_per_s": best,
        "ratio_to_peer": round(best / PEER_TOKENS, 2),
        "lines": lines,
    }
    sys.stdout.write(
        (json.dumps(found) if asked.json else f"best {best} output tokens/s, {best / PEER_TOKENS:.2f}x vLLM 0.33.0")
        + "\n"
    )
    kept = best >= BAR_TOKENS and all(line["idle"] <= BAR_IDLE for line in lines)
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:]))
