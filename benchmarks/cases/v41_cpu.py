"""DeepSig V4.1 on a CPU: prefill 64 x 512 and decode 64 rows of a random 11 M parameter model, against its GEMMs alone."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections import Counter
from typing import Any

import torch
from deepinfer_offline.models.base import ModelOptions
from deepinfer_offline.models.deepsig_v41.config import V41Config
from deepinfer_offline.models.deepsig_v41.model import DeepSigV41Model
from deepinfer_offline.models.deepsig_v41.session import Chunk, Session
from deepinfer_offline.models.deepsig_v41.synthetic import random_tensors
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

# Every mechanism of the released model at a size that a laptop runs: 11 M parameters, five layers.
CONFIG: dict[str, Any] = {
    "model_type": "deepsig_v41",
    "text_config": {
        "vocab_size": 4096,
        "hidden_size": 320,
        "moe_intermediate_size": 160,
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 128,
        "o_groups": 2,
        "o_lora_rank": 128,
        "sliding_window": 64,
        "compress_ratios": [0, 2, 1, 1, 1],
        "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2, 4],
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 128,
        "candidate_source_layer_id": 2,
        "candidate_topk_blocks": 32,
        "candidate_block_size": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "engram_layer_ids": [],
        "engram_num_embeddings": [],
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": 4096,
    },
}
_GEMMS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}


class _Memory:
    """A `TensorReader` over tensors in memory."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> list[str]:
        return list(self.tensors)

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        return "F32", tuple(self.tensors[name].shape)

    def read(self, name: str) -> torch.Tensor:
        return self.tensors[name]


class _Recorder(TorchDispatchMode):
    """Remembers every matrix product with its operands."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket._qualified_op_name.replace(".", "::") in _GEMMS:
            self.calls.append((func, args, kwargs))
        return func(*args, **kwargs)


def build_model(threads: int) -> DeepSigV41Model:
    torch.set_num_threads(threads)
    config = V41Config.parse(CONFIG)
    options = ModelOptions("cpu", torch.float32, 1024, 64, 2048, 64)
    return DeepSigV41Model.from_reader(CONFIG, _Memory(dict(random_tensors(config))), options)


def gemm_seconds(step: Any) -> tuple[float, float]:
    """Seconds that the matrix products of `step()` take alone, run again on their own operands in their order; and TFLOP."""
    with torch.no_grad(), _Recorder() as recorder:
        step()
    flops = 0.0
    for _, args, _ in recorder.calls:
        left, right = [a for a in args if isinstance(a, torch.Tensor)][-2:]
        flops += 2.0 * left.numel() * right.shape[-1]
    passes = []
    with torch.no_grad():
        for _ in range(5):
            start = time.perf_counter()
            for func, args, kwargs in recorder.calls:
                func(*args, **kwargs)
            passes.append(time.perf_counter() - start)
    return statistics.median(passes), flops / 1e12


def time_by_op(step: Any, top: int) -> list[tuple[str, float]]:
    """Where one step's time goes: (op, share of all op time), largest first."""
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        step()
    totals: Counter[str] = Counter()
    for event in prof.key_averages():
        totals[event.key] += event.self_cpu_time_total
    whole = sum(totals.values())
    return [(name, value / whole) for name, value in totals.most_common(top)]


def measure(model: DeepSigV41Model, rows: int, prompt: int, steps: int, chunk_rows: int) -> dict[str, Any]:
    """Prefill `rows` prompts in chunks of `chunk_rows` sequences, then decode them together. Only the forward is timed."""
    session = Session(model, rows, prompt + steps + 8)
    session.tokens.random_(0, model.config.vocab_size)

    def forward(batch: Any) -> None:
        model.logits(model.forward(batch, session.cache))

    def timed(batch: Any) -> float:
        start = time.perf_counter()
        forward(batch)
        return time.perf_counter() - start

    def prefill(first: int) -> Any:
        return session.batch([Chunk(slot, 0, prompt) for slot in range(first, first + chunk_rows)])

    def decode(position: int) -> Any:
        return session.batch([Chunk(slot, position, 1, prefill=False) for slot in range(rows)])

    forward(prefill(0))
    prefills = [timed(prefill(first)) for first in range(0, rows, chunk_rows)]
    forward(decode(prompt))
    decodes = [timed(decode(prompt + step)) for step in range(steps)]
    return {
        "prefill": _report(lambda: forward(prefill(0)), prefills, chunk_rows * prompt),
        "decode": _report(lambda: forward(decode(prompt + steps - 1)), decodes, rows),
    }


def _report(step: Any, seconds: list[float], tokens: int) -> dict[str, Any]:
    """Figures of one phase: `seconds` of each step, `tokens` a step."""
    alone, tflop = gemm_seconds(step)
    typical = statistics.median(seconds)
    return {
        "tokens": tokens * len(seconds),
        "seconds": round(sum(seconds), 4),
        "tokens_per_second": round(tokens * len(seconds) / sum(seconds), 1),
        "step_ms": round(1e3 * typical, 3),
        "gemm_alone_ms": round(1e3 * alone, 3),
        "step_over_gemm_alone": round(typical / alone, 3),
        "gemm_gflops_alone": round(1e3 * tflop / alone, 1),
        "time_by_op": {name: round(share, 4) for name, share in time_by_op(step, 14)},
    }


def run(argv: list[str]) -> int:
    """Run the case. Status 1 if a step takes more than `--bar` times its GEMMs alone."""
    parser = argparse.ArgumentParser(prog="v41-cpu", description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--chunk-rows", type=int, default=4, help="sequences of one prefill step")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--bar", type=float, default=2.0, help="allowed ratio of a step to its GEMMs alone")
    args = parser.parse_args(argv)
    model = build_model(args.threads)
    result = {
        "case": "v41-cpu",
        "machine": f"{platform.machine()}, {args.threads} threads, torch {torch.__version__}, float32",
        "parameters": sum(v.numel() for _, v in random_tensors(model.config)),
        **measure(model, args.rows, args.prompt, args.steps, args.chunk_rows),
    }
    ratios = {phase: result[phase]["step_over_gemm_alone"] for phase in ("prefill", "decode")}
    result["kept"] = all(ratio <= args.bar for ratio in ratios.values())
    print(json.dumps(result) if args.json else _text(result))
    return 0 if result["kept"] else 1


def _text(result: dict[str, Any]) -> str:
    lines = [f"{result['parameters'] / 1e6:.1f} M parameters, {result['machine']}"]
    for phase in ("prefill", "decode"):
        r = result[phase]
        lines.append(
            f"{phase:<8} {r['tokens_per_second']:>10.1f} tokens/s   step {r['step_ms']:.2f} ms, its GEMMs alone "
            f"{r['gemm_alone_ms']:.2f} ms at {r['gemm_gflops_alone']:.0f} GFLOP/s: ratio {r['step_over_gemm_alone']:.2f}"
        )
        lines.append("         " + ", ".join(f"{name} {100 * share:.1f} %" for name, share in r["time_by_op"].items()))
    return "\n".join(lines)


if __name__ == "__main__":
    import sys

    sys.exit(run(sys.argv[1:]))
