"""Experts at prefill: `decode_once` checked on every token and timed beside the kernel that decodes once a tile of tokens.

`deepinfer bench gpu-experts-prefill check` or `time|profile [tokens/experts ...]`.
"""

from __future__ import annotations

import argparse
import sys

import torch
from deepinfer_kernels_cuda import experts, weights
from deepinfer_kernels_cuda.reference import experts as reference
from gpu_bench import measure_ceilings, relative_error, time_cold, time_warm

HIDDEN, INTER, TOP_K, LIMIT = 5120, 2304, 6, 10.0


def natural(count: int, d: int, m: int) -> experts.PackedExperts:
    def one(rows: int, columns: int) -> weights.MxWeights:
        codes = torch.randint(0, 256, (count, rows, columns // 2), dtype=torch.uint8, device="cuda")
        scales = torch.randint(117, 121, (count, rows, -(-columns // 32)), dtype=torch.uint8, device="cuda")
        return weights.mx_weights(codes, scales, fp4=True)

    return experts.PackedExperts(one(2 * m, d), one(d, m))


def packed(count: int, d: int, m: int) -> experts.PackedExperts:
    """Any codes are codes: random ones in the packed layout, without packing."""

    def one(rows: int, columns: int, swiglu: bool) -> weights.MxWeights:
        n, k = -(-rows // 64), -(-columns // 128)
        codes = torch.randint(-(2**31), 2**31, (count, n, k, 2, 128, 4), dtype=torch.int32, device="cuda")
        scales = torch.randint(117, 121, (n * 64, k, 4), dtype=torch.uint8, device="cuda")
        words = weights._pack_scales(scales, True).expand(count, -1, -1).contiguous()
        return weights.MxWeights(codes, words, rows, columns, True, packed=True, swiglu=swiglu)

    return experts.PackedExperts(one(2 * m, d, True), one(d, m, False))


def call(x, ids, gates, made, way: str) -> torch.Tensor:
    """`decode_once`, or `tile` at loads where the package would not choose it."""
    order, offsets = experts.group_pairs(ids, made.count)
    out = torch.empty_like(x)
    run = experts._run_decode_once if way == "decode_once" else experts._run_sm90
    experts._combine(run(x, ids, gates, made, order, offsets, LIMIT), ids, None, out)
    return out


def row_error(out: torch.Tensor, want: torch.Tensor) -> float:
    out, want = out.double(), want.double()
    return float(((out - want).norm(dim=1) / want.norm(dim=1).clamp_min(1e-30)).nan_to_num(1e9).max())


def route(tokens: int, count: int, k: int = TOP_K) -> torch.Tensor:
    return torch.rand(tokens, count, device="cuda").topk(k, -1).indices


def check() -> bool:
    """Whether every case is right."""
    good = True
    small = natural(7, 272, 144)
    small_packed = experts.PackedExperts(weights.pack_sm90(small.gate_up, swiglu=True), weights.pack_sm90(small.down))
    full = natural(16, HIDDEN, INTER)
    full_packed = experts.PackedExperts(weights.pack_sm90(full.gate_up, swiglu=True), weights.pack_sm90(full.down))
    one = torch.full((300, 1), 3, device="cuda")
    some = route(333, 7, 3)
    some[some == 2] = -1  # an empty expert, pairs of none
    cases = [
        ("small, uneven", small, small_packed, some), ("small, one token", small, small_packed, route(1, 7, 2)),
        ("small, one expert with all", small, small_packed, one), ("small, int32 ids", small, small_packed, some.int()),
        ("real, 67", full, full_packed, route(67, 16)), ("real, 1024", full, full_packed, route(1024, 16)),
        ("real, one expert with all", full, full_packed, one),
    ]  # fmt: skip
    for name, plain, made, ids in cases:
        x = torch.randn(len(ids), plain.gate_up.columns, device="cuda").bfloat16()
        gates = torch.rand(ids.shape, device="cuda") * 0.5
        want = reference.moe_experts(x, ids, gates, plain.gate_up, plain.down, limit=LIMIT, dtype=torch.float32)
        try:
            out, again = (call(x, ids, gates, made, "decode_once") for _ in range(2))
            error, worst, same = relative_error(out, want), row_error(out, want), torch.equal(out, again)
        except Exception as failure:
            print(f"  {name:28s} FAILED {type(failure).__name__}: {str(failure)[:200]}", flush=True)
            good = False
            continue
        right = error < 3e-3 and worst < 2e-2 and same
        good, verdict = good and right, "ok" if right else "WRONG"
        print(f"  {name:28s} err {error:.2e} worst row {worst:.2e} repeats {same} {verdict}", flush=True)
    del full, full_packed
    made = packed(384, HIDDEN, INTER)
    ids, x = route(4096, 384), torch.randn(4096, HIDDEN, device="cuda").bfloat16()
    gates = torch.rand(ids.shape, device="cuda") * 0.5
    want, out = (call(x, ids, gates, made, way) for way in ("tile", "decode_once"))
    error, worst = relative_error(out, want), row_error(out, want)
    print(f"  4096 of 384, against `tile`  err {error:.2e} worst row {worst:.2e}", flush=True)
    return good


def timing(sizes: list[str]) -> None:
    rate = measure_ceilings().bf16_tflops
    print(f"bf16 {rate:.0f} TFLOP/s")
    made: dict[int, experts.PackedExperts] = {}
    for size in sizes:
        tokens, count = map(int, size.split("/"))
        if count not in made:
            made.clear()
            torch.cuda.empty_cache()
            made[count] = packed(count, HIDDEN, INTER)
        ids, x = route(tokens, count), torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
        gates = torch.rand(ids.shape, device="cuda") * 0.5
        flops = 6 * tokens * TOP_K * HIDDEN * INTER
        for way in ("tile", "decode_once"):
            go = lambda way=way: call(x, ids, gates, made[count], way)  # noqa: E731
            try:
                cold, warm = time_cold(go, 11), time_warm(go, 5, 5)
            except Exception as failure:
                print(f"  {size:9s} {way:12s} FAILED {type(failure).__name__}: {str(failure)[:200]}", flush=True)
                return
            print(
                f"  {size:9s} {way:12s} cold {cold:8.1f} warm {warm:8.1f} us {flops / cold / 1e6:5.0f} {flops / warm / 1e6:5.0f}"
                f" TFLOP/s share {flops / cold / 1e6 / rate:5.1%} {flops / warm / 1e6 / rate:5.1%}", flush=True,
            )  # fmt: skip


def profile(sizes: list[str], calls: int = 3) -> None:
    for size in sizes:
        tokens, count = map(int, size.split("/"))
        made = packed(count, HIDDEN, INTER)
        ids, x = route(tokens, count), torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
        gates = torch.rand(ids.shape, device="cuda") * 0.5
        for way in ("tile", "decode_once"):
            call(x, ids, gates, made, way)
            torch.cuda.synchronize()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
                for _ in range(calls):
                    call(x, ids, gates, made, way)
                torch.cuda.synchronize()
            parts = sorted(seen.key_averages(), key=lambda e: -e.device_time_total)[:5]
            print(
                f"  {size} {way}: " + ", ".join(f"{e.key[:24]} {e.device_time_total / calls:.0f}" for e in parts),
                flush=True,
            )


def run(argv: list[str]) -> int:
    """Returns 1 if `check` finds a case that is wrong."""
    parser = argparse.ArgumentParser(prog="deepinfer bench gpu-experts-prefill", description=__doc__)
    parser.add_argument("what", choices=("check", "time", "profile"))
    parser.add_argument("sizes", nargs="*", metavar="TOKENS/EXPERTS")
    asked = parser.parse_args(argv)
    torch.manual_seed(0)
    if asked.what == "check":
        return 0 if check() else 1
    sizes = asked.sizes or ["4096/384", "1024/64", "4096/64", "16384/64"]
    (timing if asked.what == "time" else profile)(sizes)
    return 0


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:]))
