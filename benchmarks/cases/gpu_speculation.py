"""What speculation with a DSpark draft costs on one CUDA device: SmolLM2's shape, a draft of two layers and blocks of five, both
with random weights.

Prints milliseconds a step of so many running sequences, for plain decoding without a draft and with one loaded, and for steps
of the loop ahead that draft and verify nothing, or all; with captured steps and without. A random draft is never right, so steps
with drafts do all of their work and gain nothing: their time against plain decode's is what accepted drafts have to win back.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from deepinfer_offline.engine.native import runner
from deepinfer_specdec.dspark import DSparkConfig, DSparkModel
from deepinfer_specdec.dspark.loader import save_draft
from gpu_engine import SMOLLM2, build, make_requests  # pyrefly: ignore
from gpu_engine_idle import by_kernel, idle_share, kernel_intervals  # pyrefly: ignore

BLOCK = 5
BAR = 2.0  # plain decode steps that a step with drafts may take, with one sequence running


def make_draft(folder: Path) -> Path:
    """A random draft of the target's widths."""
    config = DSparkConfig(
        vocab_size=SMOLLM2["vocab_size"],
        hidden_size=SMOLLM2["hidden_size"],
        intermediate_size=SMOLLM2["intermediate_size"],
        num_layers=2,
        num_heads=SMOLLM2["num_attention_heads"],
        num_kv_heads=SMOLLM2["num_key_value_heads"],
        head_dim=64,
        taps=(2, 14, 26),
        num_target_layers=SMOLLM2["num_hidden_layers"],
        block_size=BLOCK,
        mask_token_id=0,
        markov_rank=256,
    )
    torch.manual_seed(0)
    save_draft(DSparkModel(config), folder)
    return folder


def build_engine(draft: Path | None, *, speculates: bool, captured: bool) -> Any:
    make = runner.make_graphs
    if not captured:
        runner.make_graphs = lambda *_parts: None  # pyrefly: ignore
    try:
        engine = build(
            SMOLLM2, dtype="bfloat16", max_running=256, max_tokens_per_step=8192, kv_memory=8 << 30, max_model_len=2048,
            speculative="dspark" if draft else "off", draft_model=draft,
        )  # fmt: skip
        if not speculates:
            engine._parts = replace(engine._parts, speculation=None)
        return engine
    finally:
        runner.make_graphs = make


def measure(engine: Any, running: int, steps: int, heat: float) -> dict[str, Any]:
    """Milliseconds of a step by the clock, and what ran on the device in some; the sequences stay within 512 positions."""
    from torch.profiler import ProfilerActivity, profile

    requests = make_requests(running, 280, 1000, SMOLLM2["vocab_size"], temperature=heat)
    for request in requests:
        engine.add_request(request)
    while engine.stats().running < running or engine.stats().waiting:
        engine.step()
    for _ in range(10):
        engine.step()
    times = []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3 / steps)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(6):
            engine.step()
        torch.cuda.synchronize()
    for request in requests:
        engine.abort(request.request_id)
    while engine.has_unfinished():
        engine.step()
    intervals = kernel_intervals(profiler)
    busy = (max(end for _, end, _ in intervals) - intervals[0][0]) / 6e6 * (1 - idle_share(intervals))
    return {
        "step_ms": round(min(times), 3),
        "busy_ms": round(busy, 3),
        "busy_share": round(busy / min(times), 2),
        "kernels": round(len(intervals) / 6),
        "by_kernel": list(by_kernel(intervals, 6, 8)),
    }


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--running", type=int, nargs="*", default=[1, 8, 64, 256], help="the first is run without graphs too"
    )
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--captured", action="store_true", help="leave out what runs without graphs")
    parser.add_argument("--kernels", action="store_true", help="print the longest kernels of steps with drafts too")
    asked = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.stderr.write("no CUDA device\n")
        return 2
    lines: list[dict[str, Any]] = []
    plain: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as root:
        draft = make_draft(Path(root))
        cells = [
            ("plain, no draft", None, False, True, [None]),
            ("captured", draft, True, True, [0, BLOCK]),
            ("captured, sampled", draft, True, True, [BLOCK]),
            ("plain, draft loaded", draft, False, True, [None]),
            ("not captured", draft, True, False, [0, BLOCK]),
            ("plain, draft loaded, not captured", draft, False, False, [None]),
        ]
        for name, folder, speculates, captured, lengths in cells:
            if asked.captured and not captured:
                continue
            engine = build_engine(folder, speculates=speculates, captured=captured)
            for running in asked.running if captured else asked.running[:1]:
                for length in lengths:
                    if length is not None:
                        engine._parts.speculation.force(length)
                    found = measure(engine, running, asked.steps, 0.8 if "sampled" in name else 0.0)
                    plain.setdefault(running, found["step_ms"])
                    kept = name if length is None else f"drafts, verifies {length}, {name}"
                    line = {"case": kept, "running": running, "to_plain": round(found["step_ms"] / plain[running], 2)}
                    lines.append(line | found)
                    if not asked.json:
                        kernels = found.pop("by_kernel")
                        sys.stdout.write(f"{line | found}\n")
                        if asked.kernels and captured and length and running in (1, 256):
                            sys.stdout.write("\n".join(kernels) + "\n")
                        sys.stdout.flush()
            engine.close()
            del engine
            torch.cuda.empty_cache()
    found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "lines": lines}
    first = [x["to_plain"] for x in lines if x["running"] == 1 and x["case"] == f"drafts, verifies {BLOCK}, captured"]
    if asked.json:
        sys.stdout.write(json.dumps(found) + "\n")
    elif first:
        sys.stdout.write(f"one sequence: a step with drafts takes {first[0]} plain ones; the bar is {BAR}\n")
    return 0 if first and first[0] <= BAR else 1


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:]))
