# Launches kernels with arguments that no type checker knows.
# pyrefly: ignore-errors
"""Builds of the sparse MLA kernel beside each other: results against the reference, times, and where a launch spends them.

`python benchmarks/cases/gpu_mla.py BUILD [check] [time] [clocks]`; a build is `old` (what is in use) or macros joined by `+`,
as in `PRODUCERS=4+LOGITS_FIRST=1`.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from deepinfer_kernels_cuda import attention, layouts
from deepinfer_kernels_cuda.capability import sm_count
from deepinfer_kernels_cuda.native import NativeKernel
from deepinfer_kernels_cuda.reference import attention as reference
from gpu_attention import make_case
from gpu_bench import relative_error, time_cold, time_warm

ARGUMENTS = "PqqPPqqqiiiiPPqqqiiiiPPqqPiifi"
SCALE = 512**-0.5


class Build:
    """One build of the kernel for each number of splits."""

    def __init__(self, name: str) -> None:
        self.name, self.macros = name, tuple(word for word in name.split("+") if "=" in word)
        producers = dict(word.split("=") for word in self.macros).get("PRODUCERS", "8")
        self.threads = 256 + 32 * int(producers)
        self.kernels: dict[tuple[int, bool], NativeKernel] = {}

    def kernel(self, splits: int, clocks: bool) -> NativeKernel:
        """The kernel of so many splits, one that writes clock readings where asked for."""
        if (splits, clocks) not in self.kernels:
            macros = (f"SPLITS={splits}", *self.macros, *(("CLOCKS=1",) if clocks else ()))
            self.kernels[splits, clocks] = NativeKernel(
                "sparse_mla_next.cu", "sparse_mla", ARGUMENTS + "P" * clocks, threads=self.threads, shared=219 * 1024,
                defines=macros,
            )  # fmt: skip
        return self.kernels[splits, clocks]

    def run(self, case: dict[str, Any], splits: int, *, blocks: int = 0, clocks: torch.Tensor | None = None):
        """Out and log-sum-exp; `blocks`: how many take all items (one split only; default as many as the chip has units)."""
        q, pool, slots = case["q"], case["window_pool"], case["window_slots"]
        if self.name == "old":
            return attention.sparse_mla_decode(**case, splits=splits, kernel="sm90", return_lse=True)
        t, heads, n = q.shape
        view, extra = layouts.pool_view(pool, layouts.FP8, n), layouts.PoolView(0, 0, 1, 0)
        extra_pool, extra_slots = case.get("compressed_pool"), case.get("compressed_slots")
        if extra_pool is None:
            extra_pool, extra_slots = pool, slots[:, :0]
        else:
            extra = layouts.pool_view(extra_pool, layouts.NVFP4, n)
        out = torch.empty_like(q)
        lse = torch.empty(t, heads, device=q.device)
        sink = case["sink"]
        items = t * -(-heads // 64)
        grid = items * splits if splits > 1 else min(items, blocks or sm_count(q.device))
        self.kernel(splits, clocks is not None)(
            (grid, 1, 1), q.data_ptr(), q.stride(0), q.stride(1),
            pool.data_ptr(), slots.data_ptr(), view.stride_page, view.stride_row, slots.stride(0), slots.shape[1],
            view.slots, view.page_size, attention._page_shift(view.page_size),
            extra_pool.data_ptr(), extra_slots.data_ptr(), extra.stride_page, extra.stride_row, extra_slots.stride(0),
            extra_slots.shape[1], extra.slots, extra.page_size, attention._page_shift(extra.page_size),
            sink.data_ptr() if sink is not None else 0, out.data_ptr(), out.stride(0), out.stride(1), lse.data_ptr(), heads,
            int(slots.dtype == torch.int64), case["scale"] * attention._LOG2E, items,
            *(() if clocks is None else (clocks.data_ptr(),)), device=q.device, cluster=splits,
        )  # fmt: skip
        return out, lse


def odd_case(t: int, heads: int, w: int, k: int, *, long: bool = False, page: int = 0) -> dict[str, Any]:
    """Poisoned pools, absent rows, a row without keys, a sink without weight, pages."""
    case = make_case(max(t, 2), heads, selected=max(k, 1))
    used = [case["window_pool"].shape[0] - 64, case["compressed_pool"].shape[0] - 64]
    case["window_pool"][used[0] :], case["compressed_pool"][used[1] :] = 255, 255
    case["q"] = case["q"][:t]
    dtype = torch.int64 if long else torch.int32
    slots = torch.randint(0, used[0], (t, w), device="cuda", dtype=dtype)
    extra = torch.randint(0, used[1], (t, k), device="cuda", dtype=dtype)
    slots[0, ::2] = -1
    extra[0, 5:] = -1
    if t > 1:
        slots[-1], extra[-1] = -1, 1 << 20
    case["sink"][0] = -torch.inf
    case |= {"window_slots": slots, "compressed_slots": extra}
    if page:
        for name in ("window_pool", "compressed_pool"):
            pool = case[name]
            padded = torch.full((len(pool) // page, page + 1, pool.shape[1]), 255, dtype=torch.uint8, device="cuda")
            padded[:, :page] = pool[: len(pool) // page * page].view(-1, page, pool.shape[1])
            case[name] = padded[:, :page]
    if not k:
        del case["compressed_pool"], case["compressed_slots"]
    return case


def check(build: Build) -> None:
    """Largest errors over all rows of real and odd shapes, for each number of splits; two runs must give the same bits."""
    shapes = [
        make_case(64, 64), make_case(33, 64), make_case(4, 128), make_case(64, 64, selected=0),
        make_case(300, 64, distinct=False), odd_case(3, 7, 40, 33), odd_case(2, 22, 128, 130, long=True),
        odd_case(1, 8, 128, 512), odd_case(5, 100, 70, 130, page=20), odd_case(2, 64, 1, 3),
        odd_case(9, 1, 128, 0, long=True), odd_case(7, 64, 192, 700, page=64), odd_case(2, 64, 16, 0),
    ]  # fmt: skip
    for splits in (1, 2, 4, 8):
        worst, worst_lse, bad, moved = 0.0, 0.0, 0, 0
        for case in shapes:
            flat = {k: v.reshape(-1, v.shape[-1]) if k.endswith("pool") else v for k, v in case.items()}
            want, want_lse = reference.sparse_mla_decode(**flat, dtype=torch.float32)
            for blocks in (0, 3) if splits == 1 else (0,):
                out, lse = build.run(case, splits, blocks=blocks)
                again, _ = build.run(case, splits, blocks=blocks)
                torch.cuda.synchronize()
                full = torch.isfinite(want_lse)
                worst = max(worst, relative_error(out, want))
                worst_lse = max(worst_lse, float((lse - want_lse)[full].abs().max()))
                bad += int(not torch.isfinite(out).all()) + int((torch.isposinf(lse) != ~full).sum())
                moved += int((out != again).sum())
        print(
            f"check {build.name} splits={splits}: {len(shapes)} shapes, error {worst:.2e}, lse {worst_lse:.1e}, "
            f"not finite or wrongly empty {bad}, changed between runs {moved}",
            flush=True,
        )


def times(build: Build) -> None:
    """Cold and warm times of the shapes that are in `gpu_h200.md`."""
    for t, heads, selected, all_splits in (
        (64, 64, 512, (1, 2)), (16, 64, 512, (4, 8)), (1, 64, 512, (4, 8)), (32, 64, 512, (2, 4)), (128, 64, 512, (1,)),
        (256, 64, 512, (1,)), (64, 64, 0, (1, 2)), (64, 16, 512, (2,)), (64, 128, 512, (1,)), (4096, 64, 512, (1,)),
    ):  # fmt: skip
        case = make_case(t, heads, selected=selected, distinct=t < 4096)
        flops, nbytes = t * heads * (128 + selected) * 2048, t * (128 * 528 + selected * 288 + 2048 * heads)
        ceiling = max(flops / 777e6, nbytes / 4200e3 if t < 4096 else 0)
        for splits in all_splits:
            for blocks in (0, 1 << 30) if splits == 1 and t > 132 and build.name != "old" else (0,):

                def call(case=case, splits=splits, blocks=blocks):
                    return build.run(case, splits, blocks=blocks)

                cold, warm = time_cold(call, 11 if t < 4096 else 5), time_warm(call, 10 if t < 4096 else 3)
                print(
                    f"time {build.name} b={t} h={heads} 128+{selected} splits={splits}{' one item' if blocks else ''}: cold "
                    f"{cold:.1f} warm {warm:.1f} us, {ceiling / cold:.1%} {ceiling / warm:.1%} of {ceiling:.2f}, "
                    f"{flops / warm / 1e6:.0f} TFLOP/s",
                    flush=True,
                )


def clocks(build: Build) -> None:
    """Cycles from a block's start to its marks, medians over blocks: groups 0 and 1 of the consumers, first producer warp."""
    for t, splits in ((64, 2), (16, 4), (132, 1)):
        case = make_case(t, 64)
        marks = torch.zeros(t * splits, 16, 64, dtype=torch.int64, device="cuda")
        for _ in range(3):
            build.run(case, splits)
            marks.zero_()
            build.run(case, splits, clocks=marks, blocks=1 << 30)
            torch.cuda.synchronize()
        for rank in range(min(splits, 2)):
            part = marks[rank::splits]
            start = part[:, :12, :1].amin(1, keepdim=True)
            median = (part - start).median(0).values.tolist()
            for warp in (0, 4, 8):
                line = " ".join(f"{i}:{v}" for i, v in enumerate(median[warp]) if v > 0)
                print(f"clocks {build.name} b={t} splits={splits} rank {rank} warp {warp}: {line}", flush=True)


if __name__ == "__main__":
    build = Build(sys.argv[1])
    wanted = sys.argv[2:] or ["check", "time"]
    torch.manual_seed(0)
    if "check" in wanted:
        check(build)
    if "time" in wanted:
        times(build)
    if "clocks" in wanted:
        clocks(build)
