# Launches kernels with arguments that no type checker knows.
# pyrefly: ignore-errors
"""What the next visit to a GPU decides: candidates and launch shapes beside what is in use, each checked before it is timed.

`python benchmarks/cases/gpu_next.py [names...]`. Without a GPU, `TRITON_INTERPRET=1` and `--check` compare results only, on
small sizes. Cold times are taken twice: after a flush that writes (as in `gpu_ops.py`: it leaves the L2 full of lines that
must be written back first) and after one that only reads.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

import deepinfer_kernels_cuda as kernels
import torch
from deepinfer_kernels_cuda import experts as expert_ops
from deepinfer_kernels_cuda import mhc, overlap
from deepinfer_kernels_cuda.capability import device_arch
from deepinfer_kernels_cuda.kernels import mx_gemm, rows
from deepinfer_kernels_cuda.kernels import router as router_kernels
from deepinfer_kernels_cuda.layouts import pool_view, record_format
from deepinfer_kernels_cuda.reference import records

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
D, S = 5120, 4
_READ: list[torch.Tensor] = []


def rand(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def time_clean(fn: Callable[[], Any], repeats: int = 11) -> float:
    """Microseconds of a call after 256 MB were read: nothing of its data in the L2, and nothing there to be written back."""
    if not _READ:
        _READ.append(torch.ones(64 * 2**20, dtype=torch.int32, device="cuda"))
    fn()
    pairs = []
    for _ in range(repeats):
        torch.cuda._sleep(400_000)
        _READ[0].sum()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        fn()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(b.elapsed_time(e) for b, e in pairs) * 1e3


class Table:
    """Checks variants against the first one, times them, and prints a line each."""

    def __init__(self, *, check_only: bool) -> None:
        self.check_only = check_only
        self.failed = 0

    def row(self, name: str, fn: Callable[[], Any], want: Any = None, *, nbytes: float = 0.0, near: float = 0.0) -> Any:
        """Run, compare with `want` (equal, or a relative norm below `near`), and time; returns what it gave."""
        try:
            found = fn()
            wrong = "" if want is None else _difference(found, want, near)
        except Exception as failure:
            self.failed += 1
            print(f"  {name:44s} FAILED {type(failure).__name__}: {str(failure)[:240]}", flush=True)
            return None
        self.failed += bool(wrong)
        if self.check_only or wrong:
            print(f"  {name:44s} {wrong or 'ok'}", flush=True)
            return found
        from gpu_bench import time_cold, time_warm  # pyrefly: ignore

        cold, clean, warm = time_cold(fn, 11), time_clean(fn), time_warm(fn, 10, 5)
        rate = f" {nbytes / clean / 1e3:5.0f} GB/s clean, {nbytes / warm / 1e3:5.0f} warm" if nbytes else ""
        print(f"  {name:44s} cold {cold:8.1f} clean {clean:8.1f} warm {warm:8.1f} us{rate}", flush=True)
        return found


def _difference(found: Any, want: Any, near: float) -> str:
    found, want = (x if isinstance(x, (tuple, list)) else (x,) for x in (found, want))
    for a, b in zip(found, want, strict=True):
        a, b = a.double(), b.double()
        error = float((a - b).norm() / b.norm().clamp_min(1e-300))
        if not error <= near:
            return f"WRONG: relative difference {error:.2e}, allowed {near:.0e}"
    return ""


# --- mHC ---------------------------------------------------------------------------------------------------------


def mhc_chunked(streams: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, *, chunk: int,
                side: torch.cuda.Stream | None, pre: torch.Tensor, norm_weight: torch.Tensor, norm_eps: float,
                iterations: int, eps: float, output: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
                ) -> mhc.MhcStep:  # fmt: skip
    """`mhc_step` of many tokens, some at a time: the projection then finds the new streams in the L2, and with `side` it runs
    beside the next tokens' pass."""
    t, _, d = streams.shape
    new, x = torch.empty_like(streams), streams.new_empty(t, d)
    squares = torch.empty(t, dtype=torch.float32, device=streams.device)
    mixes, main = [], torch.cuda.current_stream() if side is not None else None
    for start in range(0, t, chunk):
        part = slice(start, start + chunk)
        row_pass(streams[part], output[part], post[part], comb[part], pre[part], norm_weight, new[part], x[part], squares[part],
                 norm_eps)  # fmt: skip
        if side is not None:
            side.wait_stream(main)
        with torch.cuda.stream(side):
            projected = mhc._project(new[part], fn, squares[part])
            mixes.append(mhc._finish(new[part], projected, base, scale, iterations, eps, norm_eps))
    if side is not None:
        main.wait_stream(side)
    return mhc.MhcStep(new, mhc.HyperMix(*(torch.cat(parts) for parts in zip(*mixes, strict=True))), x)


ROW_WARPS = 4


def row_pass(streams: Any, output: Any, post: Any, comb: Any, pre: Any, weight: Any, new: Any, x: Any, squares: Any,
             eps: float) -> None:  # fmt: skip
    """The row kernel into given tensors."""
    from deepinfer_kernels_cuda.kernels.mhc import mhc_row_kernel

    t, s, d = streams.shape
    main = max(16, 1 << (d.bit_length() - 1))
    mhc_row_kernel[(t,)](
        streams, output, post, comb, pre, weight, new, x, squares, d, eps, HAS_POST=True, HAS_COLLAPSE=True, HAS_NORM=True,
        HAS_SQUARE=True, S=s, D=main, REST=1 << (d - main - 1).bit_length() if d > main else 0, num_warps=ROW_WARPS,
        **overlap.overlap(streams.device),
    )  # fmt: skip


def run_mhc(table: Table) -> None:
    """Ceiling at 4,096 tokens: 99 us; now 203 to 210."""
    global ROW_WARPS
    for t, d in ((40, 96),) if table.check_only else ((1024, D), (4096, D), (16384, D)):
        fn, base, scale = (
            rand(24, S * d, dtype=torch.float32) * 0.01,
            rand(24, dtype=torch.float32),
            rand(3, dtype=torch.float32),
        )
        streams, output, weight = rand(t, S, d), rand(t, d), rand(d)
        post, pre = torch.rand(t, S, device=DEVICE), torch.rand(t, S, device=DEVICE)
        comb = torch.rand(t, S, S, device=DEVICE) / S
        options = {"pre": pre, "norm_weight": weight, "norm_eps": 1e-20, "iterations": 20, "eps": 1e-6, "output": output,
                   "post": post, "comb": comb}  # fmt: skip
        nbytes = t * d * 2 * (2 * S + 2)
        print(f"mhc_step t={t}")
        flat = lambda step: (step.streams, *step.mix, step.x)  # noqa: E731
        want = table.row("in use", lambda: flat(kernels.mhc_step(streams, fn, base, scale, **options)), nbytes=nbytes)
        if t <= mhc._ONE_PASS_TOKENS:  # the general kernels sum in another order
            near = 1e-2
        else:
            near = 1e-5
        side = torch.cuda.Stream() if DEVICE == "cuda" else None
        for warps in (4, 8):
            ROW_WARPS = warps
            for chunk in (16,) if table.check_only else (512, 1024, 2048, t):
                for beside in (None, side):
                    if chunk <= t and not (chunk == t and beside is not None):
                        table.row(
                            f"row warps {warps}, chunks of {chunk}{', beside' if beside else ''}",
                            lambda chunk=chunk, beside=beside: flat(
                                mhc_chunked(streams, fn, base, scale, chunk=chunk, side=beside, **options)
                            ),
                            want, near=near, nbytes=nbytes,
                        )  # fmt: skip
        squares = torch.empty(t, dtype=torch.float32, device=DEVICE)
        new, x = torch.empty_like(streams), torch.empty_like(output)
        if not table.check_only:
            for warps in (4, 8, 16):
                ROW_WARPS = warps
                call = lambda: row_pass(streams, output, post, comb, pre, weight, new, x, squares, 1e-20)  # noqa: E731
                table.row(f"row kernel alone, {warps} warps", call, nbytes=nbytes)


# --- router ------------------------------------------------------------------------------------------------------


def run_router(table: Table) -> None:
    """Selection alone: in use 13.4 us at 4,096."""
    from gpu_next_kernels import router_pieces_kernel  # pyrefly: ignore

    for t, experts, k in (
        ((7, 48, 6), (5, 24, 3)) if table.check_only else ((1024, 384, 6), (4096, 384, 6), (16384, 64, 6))
    ):
        logits, bias = rand(t, experts, dtype=torch.float32), rand(experts, dtype=torch.float32) * 0.1
        logits[0, ::3] = 0.25  # ties
        bias[::3] = 0
        ids, gates = torch.empty(t, k, dtype=torch.int64, device=DEVICE), torch.empty(t, k, device=DEVICE)
        width, slots = max(16, 1 << (experts - 1).bit_length()), max(2, 1 << (k - 1).bit_length())
        main = max(16, 1 << (experts.bit_length() - 1))
        rest = 1 << (experts - main - 1).bit_length() if experts > main else 0

        def in_use() -> Any:
            router_kernels.router_select_kernel[(t,)](
                logits, bias, ids, gates, t, experts, 1, 1.5, NORMALISE=True, K=k, E=width, W=slots, SPANS=1, num_warps=1,
                **overlap.overlap(logits.device),
            )  # fmt: skip
            return ids, gates

        def pieces() -> Any:
            router_pieces_kernel[(t,)](
                logits, bias, ids, gates, experts, 1.5, NORMALISE=True, K=k, E=main, REST=rest, W=slots, num_warps=1,
                **overlap.overlap(logits.device),
            )  # fmt: skip
            return ids, gates

        print(f"router selection t={t} of {experts}")
        want = table.row("in use", lambda: tuple(x.clone() for x in in_use()) if table.check_only else in_use())
        want = tuple(x.clone() for x in want)
        ids.zero_()
        table.row("two pieces, scores again", pieces, want, near=1e-6)


# --- rows --------------------------------------------------------------------------------------------------------


def run_rope(table: Table) -> None:
    """In place on [t, 64, 512]: 16 heads a program in use."""
    t, heads, n, pairs = (3, 8, 64, 8) if table.check_only else (4096, 64, 512, 32)
    q, table_ = rand(t, heads, n), (rand(t, pairs, dtype=torch.float32), rand(t, pairs, dtype=torch.float32))
    want = kernels.rope(q, table_)
    print(f"rope in place t={t}")

    def call(bh: int, warps: int) -> torch.Tensor:
        rows.rope_kernel[(t, -(-heads // bh))](
            q, q.stride(0), q.stride(1), q, q.stride(0), q.stride(1), *table_, pairs, heads, n, pairs, INVERSE=False,
            COPY=False, BH=bh, D=n, P=pairs, num_warps=warps, **overlap.overlap(q.device),
        )  # fmt: skip
        return q

    for bh, warps in ((16, 4), (32, 4), (64, 4), (64, 8)) if not table.check_only else ((4, 4), (8, 4)):
        kept = q.clone()
        wrong = _difference(call(bh, warps), want, 0.0)
        q.copy_(kept)
        table.failed += bool(wrong)
        # Each call turns on: only the first was compared.
        table.row(f"{bh} heads, {warps} warps {wrong}", lambda bh=bh, warps=warps: call(bh, warps),
                  nbytes=t * heads * 2 * pairs * 4)  # fmt: skip
        q.copy_(kept)


def run_records(table: Table) -> None:
    """Rows and warps of a program; in use: insert (2, 1), gather (8, 4)."""
    n, pairs = 512, 32
    for t in (9,) if table.check_only else (4096, 32768):
        kv, weight = rand(t, n), rand(n)
        cos, sin = rand(t, pairs, dtype=torch.float32), rand(t, pairs, dtype=torch.float32)
        slots = torch.randperm(2 * t, device=DEVICE)[:t]
        for fmt in ("fp8", "nvfp4"):
            layout, pool, other = record_format(fmt), *(records.new_pool(2 * t, fmt, n, DEVICE) for _ in range(2))
            view = pool_view(pool, layout, n)
            options = {"norm_weight": weight, "eps": 1e-20, "table": (cos, sin)}

            def insert(count: int, warps: int) -> torch.Tensor:
                rows.insert_kernel[(-(-t // count),)](
                    kv, kv.stride(0), weight, 1e-20, cos, sin, pairs, slots, other, view.stride_page // 16,
                    view.stride_row // 16, t, NORM=True, PAIRS=pairs, FORMAT=layout.code, PAGE=view.page_size,
                    GROUP=layout.group, FLOOR=layout.floor, WIDTH=n, D=n, ROWS=count, ALIGN=16,
                    HARDWARE=device_arch(kv.device) != 0, num_warps=warps, **overlap.overlap(kv.device),
                )  # fmt: skip
                return other

            def gather(count: int, warps: int) -> torch.Tensor:
                out = torch.empty(t, n, dtype=DTYPE, device=DEVICE)
                rows.gather_kernel[(-(-t // count),)](
                    pool, slots, t, view.slots, out, view.stride_page // 16, view.stride_row // 16, PAGE=view.page_size,
                    FORMAT=layout.code, GROUP=layout.group, WIDTH=n, D=n, ROWS=count, ALIGN=16,
                    HARDWARE=device_arch(kv.device) != 0, num_warps=warps, **overlap.overlap(kv.device),
                )  # fmt: skip
                return out

            print(f"records {fmt} t={t}")
            if pool.shape[-1] % 16:  # small sizes only: the launches below say 16
                continue
            size = pool.shape[-1]
            kernels.norm_rope_insert(pool, slots, kv, fmt, **options)
            for count, warps in ((1, 1), (2, 1), (4, 1), (4, 2), (8, 2), (8, 4)):
                other.zero_()
                other.copy_(records.new_pool(2 * t, fmt, n, DEVICE))
                table.row(f"insert {count} rows, {warps} warps", lambda c=count, w=warps: insert(c, w), pool,
                          nbytes=t * (2 * n + size + 264))  # fmt: skip
            want = kernels.kv_gather(pool, slots, fmt, n, DTYPE)
            for count, warps in ((4, 1), (8, 2), (8, 4), (16, 4), (16, 8), (32, 8)):
                table.row(f"gather {count} rows, {warps} warps", lambda c=count, w=warps: gather(c, w), want,
                          nbytes=t * (2 * n + size))  # fmt: skip


def run_gathers(table: Table) -> None:
    """Engram rows and pooling: rows of a program; in use 16 rows, 4 warps."""
    count, t, m, n = (50, 3, 4, 64) if table.check_only else (1 << 20, 4096, 24, 256)
    codes = rand(count, n, dtype=torch.float32).to(torch.float8_e4m3fn)
    scale = torch.randint(120, 130, (count, n // 32), dtype=torch.uint8, device=DEVICE)
    wanted = torch.randint(0, count, (t, m), device=DEVICE)
    print(f"engram rows t={t}")
    nbytes = t * m * (n + n // 32 + 2 * n)
    want = table.row(
        "in use", lambda: kernels.engram_gather(codes, scale.view(torch.float8_e8m0fnu), wanted, DTYPE), nbytes=nbytes
    )
    for br, warps in ((8, 2), (8, 4), (16, 4), (32, 4), (32, 8)):

        def call(br: int = br, warps: int = warps) -> torch.Tensor:
            out = torch.empty(t, m * n, dtype=DTYPE, device=DEVICE)
            rows.engram_gather_kernel[(-(-t * m // br),)](
                codes.view(torch.uint8), scale, wanted, t * m, out, HAS_SCALE=True, WIDTH=n, D=n, BR=br,
                HARDWARE=device_arch(out.device) != 0, num_warps=warps, **overlap.overlap(out.device),
            )  # fmt: skip
            return out

        table.row(f"{br} rows, {warps} warps", call, want, nbytes=nbytes)
    g, width = (5, 64) if table.check_only else (4096, 512)
    values, gates = rand(g, 2, width, dtype=torch.float32), rand(g, 2, width, dtype=torch.float32)
    print(f"compress groups={g}")
    want = table.row("in use (2 warps)", lambda: kernels.compress(values, gates), nbytes=g * width * 20)
    for warps in (1, 4):

        def pooled(warps: int = warps) -> torch.Tensor:
            out = torch.empty(g, width, dtype=torch.float32, device=DEVICE)
            rows.compress_kernel[(g, 1)](
                values, gates, out, width, RATIO=2, D=width, num_warps=warps, **overlap.overlap(out.device)
            )
            return out

        table.row(f"{warps} warps", pooled, want, nbytes=g * width * 20, near=1e-6)


# --- experts -----------------------------------------------------------------------------------------------------


def run_grouping(table: Table) -> None:
    """Sorting pairs by expert at prefill: 103 us a call of 98,304 in an engine's profile."""
    pairs, experts = (3000, 5) if table.check_only else (98304, 64)
    ids = torch.randint(-1, experts, (pairs // 6, 6), device=DEVICE)
    print(f"group pairs {pairs} of {experts}")
    order, offsets = expert_ops.group_pairs(ids, experts)
    want = (order[: int(offsets[-1])].clone(), offsets.clone())
    for block, warps in ((2048, 4), (4096, 8), (8192, 16), (8192, 8), (16384, 16)):

        def call(block: int = block, warps: int = warps) -> Any:
            mx_gemm.group_pairs_kernel[(experts,)](
                ids, ids.numel(), order, offsets, experts, BLOCK=block, num_warps=warps, **overlap.overlap(ids.device)
            )
            return order[: len(want[0])], offsets

        order.fill_(-1)
        table.row(f"blocks of {block}, {warps} warps", call, want)


def run_experts(table: Table) -> None:
    """A step's experts at prefill, 16,384 tokens of 64 experts: the launch in use against `decode_once`."""
    if table.check_only:
        print("experts: only on a GPU")
        return
    t, count, d, m, k = 16384, 64, D, 2304, 6

    def codes(*shape: int) -> Any:
        data = torch.randint(-128, 128, (count, shape[0], shape[1] // 2), dtype=torch.int8, device=DEVICE)
        scale = torch.randint(116, 122, (count, shape[0], shape[1] // 32), dtype=torch.uint8, device=DEVICE)
        return data, scale.view(torch.float8_e8m0fnu)

    class Weights:
        gate_up, gate_up_scale = codes(2 * m, d)
        down, down_scale = codes(d, m)

    prepared = kernels.prepare_experts(Weights)
    ids = torch.rand(t, count, device=DEVICE).topk(k).indices
    gates = torch.rand(t, k, device=DEVICE)
    for tokens in (1024, 4096, 16384):
        x = rand(tokens, d)
        arguments = (x, ids[:tokens], gates[:tokens], prepared)
        print(f"experts t={tokens} of {count}: {6 * tokens * k * d * m / 1e12:.2f} TFLOP")
        limit, expert_ops.DECODE_ONCE_PAIRS = expert_ops.DECODE_ONCE_PAIRS, 1 << 30
        want = table.row("by expert tile", lambda a=arguments: kernels.moe_experts(*a, limit=10.0))
        expert_ops.DECODE_ONCE_PAIRS = limit
        table.row(
            "decode_once",
            lambda a=arguments: kernels.moe_experts(*a, limit=10.0, kernel="decode_once"),
            want,
            near=4e-3,
        )


PARTS = {
    "experts": run_experts, "mhc": run_mhc, "router": run_router, "grouping": run_grouping, "gathers": run_gathers,
    "rope": run_rope, "records": run_records,
}  # fmt: skip


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(PARTS)}; all without one")
    parser.add_argument("--check", action="store_true", help="compare results only, on small sizes")
    asked = parser.parse_args(argv)
    if DEVICE == "cpu" and not asked.check:
        sys.stderr.write("no CUDA device\n")
        return 2
    torch.manual_seed(0)
    table = Table(check_only=asked.check)
    for name in asked.names or PARTS:
        PARTS[name](table)
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
    print(f"{table.failed} failed")
    return 1 if table.failed else 0


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:]))
