"""The kernels of a V4.1 decode step by op, each beside the least time that its bytes or products take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COPY_GBS, MATRIX_TFLOPS = 4_200, 775  # of such a card, measured: read and written bytes, bf16 product of 8192^3

_MARKS = (  # part of a kernel's name -> the op that it belongs to
    ("mhc", "hyper-connections"), ("sparse_mla", "sparse attention"), ("mla_", "sparse attention"), ("rope", "rotation"),
    ("insert", "records"), ("gather_kernel", "records"), ("rms_norm", "norms"), ("rout", "router"), ("gate_", "router"),
    ("swiglu_rows", "shared activation"), ("group_pairs", "experts"), ("mx_gemm", "experts"), ("moe", "experts"),
    ("expert", "experts"), ("combine", "experts"), ("index", "indexer"), ("topk", "top-k"), ("argmax", "argmax"),
    ("pool_groups", "compressor"), ("keep_rows", "compressor"), ("window", "indices"), ("slots", "indices"),
    ("rotation", "indices"), ("step_inputs", "indices"), ("grouped_output", "output projection"),
)  # fmt: skip
_PRODUCTS = ("nvjet", "gemm", "splitKreduce", "cutlass", "cublas")


def name_ops(names: list[str]) -> list[str]:
    """The op of each kernel of a decode step, in order. Products of cuBLAS are told apart by the kernels around them."""
    marks = []
    for name in names:
        product = any(part in name for part in _PRODUCTS) and "mx_gemm" not in name
        found = next((op for part, op in _MARKS if part in name), "other")
        marks.append("product" if product and found in ("other", "output projection") else found)
    ops = list(marks)
    for place, mark in enumerate(marks):
        if mark != "product":
            continue
        before = [m for m in marks[:place] if m not in ("product", "other", "indices")][-1:]
        after = [m for m in marks[place:] if m not in ("product", "other", "indices")][:2]
        ops[place] = _product(before[0] if before else "", after, ops[:place], names[place])
    return ops


def _product(before: str, after: list[str], ops: list[str], name: str) -> str:
    if "splitKreduce" in name:
        return ops[-1]
    if after == ["rotation", "sparse attention"]:
        return "wq_b"
    if before in ("rotation", "output projection") and "hyper-connections" in after[:1]:
        return "wo_a" if before == "rotation" and ops[-1] not in ("wo_a", "wo_b") else "wo_b"
    table = {"hyper-connections": "wqkv_a", "router": "shared up", "shared activation": "shared down"}
    if after[:1] == ["argmax"]:
        return "head"
    return table.get(before, "compressor and indexer products")


def ceilings(c: Mapping[str, Any], count: int, context: int) -> dict[str, float]:
    """Microseconds that each op of a step must take: weight bytes at the measured copy rate, or matrix work at the bf16 rate."""
    d, m, heads, n, layers = c["hidden_size"], c["moe_intermediate_size"], 64, c["head_dim"], c["num_hidden_layers"]
    experts = c["n_routed_experts"] * (1 - (1 - c["num_experts_per_tok"] / c["n_routed_experts"]) ** count)
    width = {
        "wqkv_a": d * (c["q_lora_rank"] + n), "wq_b": c["q_lora_rank"] * heads * n, "wo_a": heads * n * c["o_lora_rank"],
        "wo_b": d * 8 * c["o_lora_rank"], "shared up": 2 * m * d, "shared down": m * d,
    }  # fmt: skip
    bytes_ = {op: 2 * size * layers for op, size in width.items()}
    bytes_["head"] = 2 * d * c["vocab_size"]
    bytes_["experts"] = experts * 3 * m * d * 17 / 32 * layers
    bytes_["hyper-connections"] = 2 * layers * (4 * 24 * 4 * d + count * (2 * 4 + 2) * 2 * d)
    bytes_["router"] = layers * 2 * d * c["n_routed_experts"]
    bytes_["argmax"] = 4 * count * c["vocab_size"]
    bytes_["indexer"] = count * 68 * (context // 2 + 2 * context)
    bytes_["output projection"] = bytes_["wo_a"]
    found = {op: size / COPY_GBS / 1e3 for op, size in bytes_.items()}
    keys = [128, 128] + [640] * (layers - 2)
    flops = sum(count * heads * k * n * 4 for k in keys)
    moved = sum(count * (128 * 528 + (k - 128) * 288 + 4 * heads * n) for k in keys)
    found["sparse attention"] = max(flops / MATRIX_TFLOPS / 1e6, moved / COPY_GBS / 1e3)
    return found


def op_table(
    config: Mapping[str, Any], intervals: list[tuple[int, int, str]], steps: int, count: int, context: int
) -> list[str]:
    """Microseconds a step by op, and what share of it the ceiling would take."""
    per_step = len(intervals) // steps
    begin = next(i for i in range(per_step, len(intervals)) if "step_inputs" in intervals[i][2])
    chosen = intervals[begin : begin + per_step]
    totals: dict[str, list[float]] = {}
    for (start, end, _), op in zip(chosen, name_ops([name for _, _, name in chosen]), strict=True):
        entry = totals.setdefault(op, [0.0, 0])
        entry[0] += (end - start) / 1e3
        entry[1] += 1
    bound = ceilings(config, count, context)
    rows = []
    for op, (us, calls) in sorted(totals.items(), key=lambda item: -item[1][0]):
        share = f"{bound[op] / us:6.1%} of {bound[op]:7.1f} us" if op in bound else ""
        rows.append(f"    {us:8.1f} us {int(calls):4d} kernels  {op:32s} {share}")
    return [*rows, f"    ceilings together {sum(bound[op] for op in bound if op in totals) / 1e3:.2f} ms"]
