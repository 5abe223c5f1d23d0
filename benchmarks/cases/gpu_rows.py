# Launches kernels with arguments that no type checker knows.
# pyrefly: ignore-errors
"""The seam of hyper-connections and the record inserts: each way of running them checked against float64, then timed.

`python benchmarks/cases/gpu_rows.py mhc|records [--way NAME] [--tokens N ...] [--check]`. The ways of mhc: `triton` (streams
in registers, or two passes) and `rows` (one kernel); of records: 0 (Triton) or a number of blocks a multiprocessor.
Ceilings: bytes over the copy rate of this run. With `--check` nothing is timed, and the status is 1 if an error is above its
tolerance, a run differs from the one before it, or a record from Triton's.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import deepinfer_kernels_cuda as kernels
import torch
from deepinfer_kernels_cuda import mhc, records
from deepinfer_kernels_cuda.reference import records as reference
from gpu_bench import measure_ceilings, time_cold, time_copy, time_warm

D, S = 5120, 4
DEVICE = "cuda"
# What `mhc_errors` may say: see there for the units. Coefficients are sums of 20,480 products in float32.
TOLERANCES = {"streams": 1.01, "x": 3.1, "pre": 1e-4, "post": 1e-4, "comb": 1e-4}


def rand(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


# --- mHC ---------------------------------------------------------------------------------------------------------


def take_way(way: str) -> None:
    """Make `mhc_step` run one way, whatever the number of tokens: `triton` or `rows`."""
    mhc._ROW_TOKENS = range(1, 1 << 30) if way == "rows" else ()


def mhc_inputs(t: int, d: int) -> tuple[tuple, dict]:
    # The size of the projection makes coefficients of order one, as a trained model has them.
    fn = rand(24, S * d, dtype=torch.float32) * 0.01
    base, scale = rand(24, dtype=torch.float32), rand(3, dtype=torch.float32)
    options = {"pre": torch.rand(t, S, device=DEVICE), "norm_weight": rand(d), "norm_eps": 1e-20, "iterations": 20,
               "eps": 1e-6, "output": rand(t, d), "post": torch.rand(t, S, device=DEVICE),
               "comb": torch.rand(t, S, S, device=DEVICE) / S}  # fmt: skip
    return (rand(t, S, d), fn, base, scale), options


def mhc_errors(step: Any, tensors: tuple, options: dict, chunk: int = 512) -> dict[str, float]:
    """Largest errors over all tokens: streams and x in halves of bfloat16's last place, mixes absolute.

    x is rounded twice, and the first rounding may fall the other way: three halves.

    What follows from the new streams is computed from those that the step gave, so that a rounding that fell the other way
    counts once.
    """
    streams, fn, base, scale = tensors
    worst = dict.fromkeys(("streams", "x", "pre", "post", "comb"), 0.0)

    def note(name: str, found: torch.Tensor, want: torch.Tensor, relative: bool = False) -> None:
        gap = (found.double() - want).abs()
        if relative:
            gap = gap / (want.abs() * 2.0**-8 + 1e-5)
        largest = float(gap.max())
        worst[name] = max(worst[name], largest) if largest == largest else float("inf")

    for first in range(0, streams.shape[0], chunk):
        part = slice(first, first + chunk)
        post, comb, pre = (options[k][part].double() for k in ("post", "comb", "pre"))
        new = post[:, :, None] * options["output"][part].double()[:, None]
        new = new + torch.einsum("tio,tid->tod", comb, streams[part].double())
        note("streams", step.streams[part], new, True)
        own = step.streams[part].double()
        row = torch.einsum("ts,tsd->td", pre, own).float().bfloat16().double()
        inverse = 1 / (row.square().mean(-1, keepdim=True) + options["norm_eps"]).sqrt()
        note("x", step.x[part], row * inverse * options["norm_weight"].double(), True)
        flat = own.flatten(1)
        mixed = flat @ fn.double().T / (flat.square().mean(-1, keepdim=True) + options["norm_eps"]).sqrt()
        factor = scale.double().repeat_interleave(torch.tensor([4, 4, 16], device=scale.device))
        mixed = mixed * factor + base.double()
        note("pre", step.mix.pre[part], mixed[:, :4].sigmoid() + options["eps"])
        note("post", step.mix.post[part], 2 * mixed[:, 4:8].sigmoid())
        c = mixed[:, 8:].unflatten(1, (4, 4)).softmax(-1) + options["eps"]
        c = c / (c.sum(1, keepdim=True) + options["eps"])
        for _ in range(options["iterations"] - 1):
            c = c / (c.sum(2, keepdim=True) + options["eps"])
            c = c / (c.sum(1, keepdim=True) + options["eps"])
        note("comb", step.mix.comb[part], c)
    return worst


def flat(step: Any) -> tuple:
    return (step.streams, *step.mix, step.x)


def check_mhc(way: str, t: int, d: int) -> bool:
    """Print the errors of one size. Returns whether all are within `TOLERANCES`, and every run gave the same bits."""
    tensors, options = mhc_inputs(t, d)
    poison = torch.full((t * d * 12 + 4096,), float("nan"), device=DEVICE, dtype=torch.bfloat16)
    del poison
    step = kernels.mhc_step(*tensors, **options)
    errors = mhc_errors(step, tensors, options)
    same = all(
        all(torch.equal(a, b) for a, b in zip(flat(kernels.mhc_step(*tensors, **options)), flat(step), strict=True))
        for _ in range(4)
    )
    above = [f"{name} {errors[name]:.2g} is above {most:g}" for name, most in TOLERANCES.items() if errors[name] > most]
    above += [] if same else ["runs differ"]
    words = " ".join(f"{name} {value:.2g}" for name, value in errors.items())
    verdict = "WRONG: " + ", ".join(above) if above else "ok"
    print(f"  {way:24s} t={t:<6d} d={d} {words} same bits {same} {verdict}", flush=True)
    return not above


def time_mhc(way: str, t: int, copy: float) -> None:
    tensors, options = mhc_inputs(t, D)
    call = lambda: kernels.mhc_step(*tensors, **options)  # noqa: E731
    ceiling = (t * D * 2 * (2 * S + 2) + 24 * S * D * 4) / copy / 1e3
    cold, clean, warm = time_cold(call, 11), time_cold(call, 11, clean=True), time_warm(call, 10, 5)
    print(f"  {way:24s} t={t:<6d} cold {cold:7.1f} clean {clean:7.1f} warm {warm:7.1f} us, of copy {ceiling / cold:.1%}"
          f" {ceiling / clean:.1%} {ceiling / warm:.1%}", flush=True)  # fmt: skip


# --- records -----------------------------------------------------------------------------------------------------


class Insert:
    """One insert of t rows and where it goes."""

    def __init__(
        self, fmt: str, t: int, *, norm: bool = True, turn: bool = True, page: int = 1, wide: bool = True
    ) -> None:
        self.fmt, self.t, self.page = fmt, t, page
        self.values = (rand(t, 1792) * 3)[:, 1280:]
        if (
            not norm
        ):  # times a negative weight zeros differ by their sign, which the portable kernel loses where nothing turns
            self.values[t // 3] = 0
        slots = torch.randperm(2 * t, device=DEVICE)[:t]
        slots[:: max(2, t // 5)] = -1
        self.slots = slots if wide else slots.int()
        table = (rand(t, 32, dtype=torch.float32).cos(), rand(t, 32, dtype=torch.float32).sin())
        self.options = {"table": table} if turn else {}
        if norm:
            self.options |= {"norm_weight": rand(512), "eps": 1e-20}
        if fmt == "v4":
            self.page = 64
            pages = -(-2 * t // 64)
            self.pool = torch.full((pages, 64 * 584 + 128), 0xFF, dtype=torch.uint8, device=DEVICE)[:, : 64 * 584 + 64]
        else:
            pool = reference.new_pool(-(-2 * t // page) * page, fmt, 512, "cuda")
            self.pool = pool.view(-1, page, pool.shape[-1]) if page > 1 else pool
            self.pool.fill_(0xFF)

    def run(self, pool: torch.Tensor) -> torch.Tensor:
        if self.fmt == "v4":
            kernels.v4_insert(pool, self.slots, self.values, page_size=64, **self.options)
        else:
            kernels.norm_rope_insert(pool, self.slots, self.values, self.fmt, **self.options)
        return pool

    def gather(self, pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        if self.fmt == "v4":
            return kernels.v4_gather(pool, slots, torch.bfloat16, page_size=64)
        return kernels.kv_gather(pool, slots, self.fmt, 512, torch.bfloat16)


def use_warps(blocks: int) -> None:
    """Which kernels write and read records: 0 is Triton's."""
    records._WARP_ROWS = 1 if blocks else 1 << 30
    records._WARP_BLOCKS = blocks or 2


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all values have the same bits, any NaN counting as any other."""
    return bool(((a.view(torch.int16) == b.view(torch.int16)) | (a.isnan() & b.isnan())).all())


def check_records(way: int) -> bool:
    """Print what differs from Triton's kernels. Returns whether nothing does."""
    cases = [(fmt, t, norm, turn, page, wide) for fmt in ("fp8", "nvfp4", "v4") for t in (1, 9, 1025, 5000)
             for norm, turn, page, wide in ((True, True, 1, True), (False, False, 1, True), (True, False, 64, False),
                                            (False, True, 48, True))]  # fmt: skip
    wrong = []
    for fmt, t, norm, turn, page, wide in cases:
        insert = Insert(fmt, t, norm=norm, turn=turn, page=page, wide=wide)
        absent = torch.randint(-2, 4 * t, (t + 3,), device=DEVICE)
        use_warps(0)
        want = insert.run(insert.pool.clone())
        want_rows = insert.gather(want, insert.slots), insert.gather(want, absent)
        use_warps(way)
        found = insert.run(insert.pool.clone())
        found_rows = insert.gather(want, insert.slots), insert.gather(want, absent)
        name = f"{fmt} t={t} norm={norm} turn={turn} page={page}"
        if not torch.equal(found, want):
            wrong.append(f"{name}: {int((found != want).sum())} bytes")
        if not all(map(same_bits, found_rows, want_rows)):
            wrong.append(f"{name}: gathered")
    print(f"  warps {way}: {len(cases)} inserts and gathers, {len(wrong)} differ: {wrong[:6]}", flush=True)
    return not wrong


def time_records(way: int, t: int, copy: float) -> None:
    use_warps(way)
    name = f"warps {way}" if way else "triton"
    for fmt, size in (("fp8", 528), ("nvfp4", 288), ("v4", 584)):
        insert = Insert(fmt, t)
        insert.values = insert.values.contiguous()
        insert.slots = torch.randperm(2 * t, device=DEVICE)[:t]
        insert.run(insert.pool)
        calls = {
            "insert": (lambda insert=insert: insert.run(insert.pool), t * (1024 + size + 264)),
            "gather": (lambda insert=insert: insert.gather(insert.pool, insert.slots), t * (1024 + size)),
        }
        for op, (call, nbytes) in calls.items():
            ceiling = nbytes / copy / 1e3
            cold, clean, warm = time_cold(call, 11), time_cold(call, 11, clean=True), time_warm(call, 10, 5)
            copies = time_copy(nbytes)
            print(f"  {op} {fmt:6s} t={t:<6d} {name:8s} cold {cold:6.1f} clean {clean:6.1f} warm {warm:6.1f} us, share"
                  f" {ceiling / cold:.1%} {ceiling / clean:.1%} {ceiling / warm:.1%}, of a copy of as many bytes"
                  f" {copies[0] / cold:.1%} cold {copies[1] / warm:.1%} warm", flush=True)  # fmt: skip


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="deepinfer bench gpu-rows", description=__doc__)
    parser.add_argument("op", choices=("mhc", "records"))
    parser.add_argument("--way", default="rows")
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 1024, 4096])
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    verdicts: list[bool] = []
    if options.op == "mhc":
        take_way(options.way)
        if options.way != "triton":
            print(f"  teams at once: {mhc._teams(torch.device(DEVICE), D // 512)}", flush=True)
        if options.check:
            sizes = [*((t, D) for t in options.tokens), (77, 1024), (300, 4096)]
            verdicts = [check_mhc(options.way, t, d) for t, d in sizes]
        else:
            copy = measure_ceilings().copy_gbs
            for t in options.tokens:
                time_mhc(options.way, t, copy)
    elif options.check:
        verdicts = [check_records(int(options.way))]
    else:
        copy = measure_ceilings().copy_gbs
        for t in options.tokens:
            time_records(int(options.way), t, copy)
    if not all(verdicts):
        print(f"WRONG: {verdicts.count(False)} of {len(verdicts)} checks failed", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:]))
