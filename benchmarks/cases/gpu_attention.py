"""Sparse MLA decode and prefill at V4.1's shapes: 64 heads x 512, 128 window + 512 selected records."""

from __future__ import annotations

import torch
from deepinfer_kernels_cuda import attention, capability
from deepinfer_kernels_cuda.reference import attention as reference
from deepinfer_kernels_cuda.reference import records
from gpu_bench import Recorder, record_case, relative_error


def make_case(queries: int, heads: int, window: int = 128, selected: int = 512, distinct: bool = True) -> dict:
    """Random records and slots: every query has its own window, selected rows are drawn from the whole pool."""
    generator = torch.Generator("cuda").manual_seed(queries * 131 + heads)
    rows = max(queries * window if distinct else 4096, 2048)
    window_pool = records.new_pool(rows, "fp8", 512, "cuda")
    extra_rows = max(queries * selected if distinct else 32768, 4096)
    extra_pool = records.new_pool(extra_rows, "nvfp4", 512, "cuda")
    for pool, fmt in ((window_pool, "fp8"), (extra_pool, "nvfp4")):
        for begin in range(0, pool.shape[0], 8192):
            end = min(begin + 8192, pool.shape[0])
            values = torch.randn(end - begin, 512, device="cuda", generator=generator)
            records.kv_insert(pool, torch.arange(begin, end, device="cuda"), values, fmt)
    if distinct:
        slots = torch.randperm(rows, device="cuda", generator=generator)[: queries * window].view(queries, window)
        extra = torch.randperm(extra_rows, device="cuda", generator=generator)[: queries * selected]
        extra = extra.view(queries, selected)
    else:
        begin = torch.arange(queries, device="cuda")[:, None] % (rows - window)
        slots = begin + torch.arange(window, device="cuda")
        extra = torch.randint(0, extra_rows, (queries, selected), device="cuda", generator=generator)
    q = torch.randn(queries, heads, 512, device="cuda", generator=generator).bfloat16()
    case = {
        "q": q,
        "window_pool": window_pool,
        "window_slots": slots.int(),
        "sink": torch.randn(heads, device="cuda", generator=generator),
        "scale": 512**-0.5,
    }
    if selected:
        case |= {"compressed_pool": extra_pool, "compressed_slots": extra.int()}
    return case


def name(queries: int, heads: int, keys: int, splits: int | None) -> str:
    """Of the kernel that runs: the one for few queries where it is the default."""
    sms = capability.sm_count(torch.device("cuda"))
    few = attention.choose_few(queries, heads, 128, keys - 128, sms) if splits is None else None
    return f"sm90 few {few.splits} x {few.heads}" if few else f"sm90 splits={splits}"


def check(case: dict, **options: object) -> float:
    """Largest relative error over at most 64 queries."""
    out = attention.sparse_mla_decode(**case, **options)[:64]
    part = {k: v[:64] if k in ("q", "window_slots", "compressed_slots") else v for k, v in case.items()}
    return relative_error(out, reference.sparse_mla_decode(**part, dtype=torch.float32)[0])


def measure(recorder: Recorder) -> None:
    """Decode at several batch sizes, window-only layers, 16 heads, and prefill."""
    for queries, heads, selected, splits in (
        (64, 64, 512, (1, 2)),
        (128, 64, 512, (1,)),
        (256, 64, 512, (1,)),
        (16, 64, 512, (2, 4)),
        (11, 64, 512, (None, 4)),
        (8, 64, 512, (None, 8)),
        (7, 64, 512, (None, 8)),
        (4, 64, 512, (None, 8)),
        (3, 64, 512, (None, 8)),
        (2, 64, 512, (None, 8)),
        (1, 64, 512, (None, 8)),
        (64, 64, 0, (1, 2)),
        (64, 16, 512, (2,)),
        (16, 16, 512, (None, 4)),
        (64, 128, 512, (1,)),
    ):
        case = make_case(queries, heads, selected=selected)
        keys = 128 + selected
        nbytes = queries * (128 * 528 + selected * 288 + 2 * heads * 512 * 2)
        flops = queries * heads * keys * 512 * 2 * 2
        for split in splits:

            def call(case=case, split=split):
                return attention.sparse_mla_decode(**case, splits=split, kernel="sm90")

            try:
                error = check(case, splits=split, kernel="sm90")
            except Exception as failure:
                print(f"sparse_mla_decode b={queries} h={heads} FAILED {type(failure).__name__}: {str(failure)[:500]}")
                continue
            recorder.record(
                "sparse_mla_decode",
                f"b={queries} h={heads} keys=128+{selected}",
                name(queries, heads, keys, split),
                call,
                nbytes=nbytes,
                flops=flops,
                error=error,
            )
    case = make_case(64, 64)
    error = check(case, kernel="portable")
    recorder.record(
        "sparse_mla_decode",
        "b=64 h=64 keys=128+512",
        "portable",
        lambda: attention.sparse_mla_decode(**case, kernel="portable"),
        nbytes=64 * 346e3,
        flops=64 * 8.39e7,
        error=error,
    )
    case = make_case(4096, 64, distinct=False)
    error = check(case, kernel="sm90")
    recorder.record(
        "sparse_mla_prefill",
        "t=4096 h=64 keys=128+512",
        "sm90 from records",
        lambda: attention.sparse_mla_decode(**case, kernel="sm90"),
        nbytes=4096 * 2 * 64 * 512 * 2 + 32768 * 288 + 4096 * 528,
        flops=4096 * 8.39e7,
        error=error,
    )
    kv = torch.randn(36864, 512, device="cuda").bfloat16()
    q = case["q"]
    idx = torch.cat((case["window_slots"], case["compressed_slots"] + 4096), 1)
    sink = case["sink"]
    out = attention.sparse_mla_prefill(q, kv, idx, sink, scale=512**-0.5)[:32]
    want = reference.sparse_mla_prefill(q[:32], kv, idx[:32], sink, scale=512**-0.5, dtype=torch.float32)[0]
    recorder.record(
        "sparse_mla_prefill",
        "t=4096 h=64 keys=640",
        "portable workspace",
        lambda: attention.sparse_mla_prefill(q, kv, idx, sink, scale=512**-0.5),
        nbytes=4096 * 2 * 64 * 512 * 2 + 36864 * 1024,
        flops=4096 * 8.39e7,
        error=relative_error(out, want),
    )


def run(argv: list[str]) -> int:
    return record_case("attention", measure, argv)


if __name__ == "__main__":
    import sys

    raise SystemExit(run(sys.argv[1:]))
