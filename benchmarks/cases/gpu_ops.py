"""The streaming ops at V4.1's shapes: mHC, router, indexer, top-k, records, norms, compressor, Engram, end of a step, GQA."""

from __future__ import annotations

import deepinfer_kernels_cuda as kernels
import torch
from deepinfer_kernels_cuda.layouts import V4
from deepinfer_kernels_cuda.reference import records
from gpu_bench import Recorder, record_case

D, S, VOCAB = 5120, 4, 129280


def run_mhc(recorder: Recorder) -> None:
    """The fused seam: bytes = streams read and written, output read, x written."""
    fn, base, scale = (
        torch.randn(24, S * D, device="cuda") * 0.01,
        torch.randn(24, device="cuda"),
        torch.randn(3, device="cuda"),
    )
    weight = torch.randn(D, device="cuda").bfloat16()
    for t in (8, 64, 1024, 4096, 16384):
        streams = torch.randn(t, S, D, device="cuda").bfloat16()
        output = torch.randn(t, D, device="cuda").bfloat16()
        post, pre = torch.rand(t, S, device="cuda"), torch.rand(t, S, device="cuda")
        comb = torch.rand(t, S, S, device="cuda") / S
        recorder.record(
            "mhc_step",
            f"t={t}",
            "portable",
            lambda: kernels.mhc_step(
                streams,
                fn,
                base,
                scale,
                pre=pre,
                norm_weight=weight,
                norm_eps=1e-20,
                iterations=20,
                eps=1e-6,
                output=output,
                post=post,
                comb=comb,
            ),
            nbytes=t * D * 2 * (2 * S + 2) + fn.numel() * 4,
        )


def run_router(recorder: Recorder) -> None:
    """384 experts, top 6."""
    weight, bias = torch.randn(384, D, device="cuda").bfloat16() * 0.01, torch.randn(384, device="cuda") * 0.1
    for t in (8, 64, 256, 1024, 4096, 16384):
        x = torch.randn(t, D, device="cuda").bfloat16()
        recorder.record(
            "router",
            f"t={t}",
            "sm90" if t <= 256 else "cuBLAS, sm90",
            lambda: kernels.router(x, weight, bias, k=6, normalise=True, scale=1.5),
            nbytes=t * D * 2 + weight.numel() * 2,
            flops=2 * t * D * 384,
        )


def run_indexer(recorder: Recorder) -> None:
    """64 queries over 64K MXFP4 entries, and top 512 of the scores."""
    pages, size = 16384, 64
    pool = records.new_pool(pages * size, "mxfp4", 128, "cuda")
    for begin in range(0, pages * size, 65536):
        values = torch.randn(65536, 128, device="cuda")
        records.kv_insert(pool, torch.arange(begin, begin + 65536, device="cuda"), values, "mxfp4")
    paged = pool.view(pages, size, 68)
    for t, entries in ((64, 65536), (64, 2048), (8, 2048), (1, 1 << 20)):
        per = entries // size
        table = torch.stack([torch.randperm(pages, device="cuda")[:per] for _ in range(t)]).int()
        index = torch.arange(t * 32, device="cuda")
        rounded = records.new_pool(t * 32, "mxfp4", 128, "cuda")
        records.kv_insert(rounded, index, torch.randn(t * 32, 128, device="cuda"), "mxfp4")
        q = kernels.kv_gather(rounded, index, "mxfp4", 128, torch.bfloat16).view(t, 32, 128)
        weights = torch.randn(t, 32, device="cuda").bfloat16()
        visible = torch.full((t,), entries, dtype=torch.int32, device="cuda")
        rows = torch.arange(t, device="cuda", dtype=torch.int32)
        call = lambda: kernels.indexer_logits(q, weights, paged, table, rows, visible, max_entries=entries)  # noqa: E731
        recorder.record(
            "indexer_logits",
            f"q={t} entries={entries}",
            "sm90",
            call,
            nbytes=t * entries * (68 + 4),
            flops=2 * t * entries * 32 * 128,
        )
        scores = call()
        recorder.record(
            "topk_lowest_index",
            f"{t}x{entries} k=512",
            "sm90",
            lambda: kernels.topk_lowest_index(scores, 512),
            nbytes=t * entries * 4,
        )
    if entries:
        zeros = torch.zeros(64, 65536, device="cuda")
        recorder.record(
            "topk_lowest_index",
            "64x65536 k=512 all equal",
            "sm90",
            lambda: kernels.topk_lowest_index(zeros, 512),
            nbytes=64 * 65536 * 4,
        )
        recorder.record(
            "topk (torch, any tie)",
            "64x65536 k=512",
            "torch",
            lambda: torch.topk(scores.view(-1)[: 64 * 16384].view(64, -1), 512),
            nbytes=64 * 16384 * 4,
        )


def run_rows(recorder: Recorder) -> None:
    """Norm, rope, records, compressor, Engram rows. At 4,096 tokens a row of records is launch-bound: hence 32,768 too."""
    for t in (64, 1024, 4096, 32768):
        _norms(recorder, t)
        _records(recorder, t)
        values, gates = torch.randn(t, 2, 512, device="cuda"), torch.randn(t, 2, 512, device="cuda")
        recorder.record(
            "compress",
            f"groups={t} ratio=2",
            "portable",
            lambda: kernels.compress(values, gates),
            nbytes=t * 512 * 4 * 5,
        )
    table8 = torch.randn(1 << 20, 256, device="cuda").to(torch.float8_e4m3fn)
    scale = torch.randint(120, 130, (1 << 20, 8), dtype=torch.uint8, device="cuda").view(torch.float8_e8m0fnu)
    for t in (64, 1024, 4096):
        rows = torch.randint(0, 1 << 20, (t, 24), device="cuda")
        recorder.record(
            "engram_gather",
            f"t={t} 24x256",
            "portable",
            lambda: kernels.engram_gather(table8, scale, rows, torch.bfloat16),
            nbytes=t * 24 * (264 + 512),
        )


def _norms(recorder: Recorder, t: int) -> None:
    """Norm and rotation, up to 16,384 tokens."""
    t = min(t, 16384)
    x, weight = torch.randn(t, D, device="cuda").bfloat16(), torch.randn(D, device="cuda").bfloat16()
    recorder.record(
        "rms_norm", f"t={t} n={D}", "portable", lambda: kernels.rms_norm(x, weight, 1e-20), nbytes=t * D * 4
    )
    q = torch.randn(t, 64, 512, device="cuda").bfloat16()
    table = (torch.randn(t, 32, device="cuda"), torch.randn(t, 32, device="cuda"))
    recorder.record(
        "rope (in place)",
        f"t={t} 64x512",
        "portable",
        lambda: kernels.rope(q, table, inplace=True),
        nbytes=t * 64 * 64 * 2 * 2 + t * 256,
    )


def _records(recorder: Recorder, t: int) -> None:
    """Records of 528, 288 and 584 bytes: norm, rotate, round and write; read back."""
    kv, weight = torch.randn(t, 512, device="cuda").bfloat16(), torch.randn(512, device="cuda").bfloat16()
    table = (torch.randn(t, 32, device="cuda"), torch.randn(t, 32, device="cuda"))
    slots = torch.randperm(2 * t, device="cuda")[:t]
    kernel = "sm90" if t >= 1024 else "portable"
    options = {"norm_weight": weight, "eps": 1e-20, "table": table}
    for fmt in ("fp8", "nvfp4"):
        pool = records.new_pool(2 * t, fmt, 512, "cuda")
        size = pool.shape[1]
        recorder.record(
            "norm_rope_insert",
            f"t={t} {fmt}",
            kernel,
            lambda: kernels.norm_rope_insert(pool, slots, kv, fmt, **options),
            nbytes=t * (1024 + size + 264),
        )
        recorder.record(
            "kv_gather",
            f"t={t} {fmt}",
            "portable",
            lambda: kernels.kv_gather(pool, slots, fmt, 512, torch.bfloat16),
            nbytes=t * (1024 + size),
        )
    planar = torch.zeros(2 * t // 64, V4.page_bytes(64), dtype=torch.uint8, device="cuda")
    recorder.record(
        "v4_insert",
        f"t={t}",
        kernel,
        lambda: kernels.v4_insert(planar, slots, kv, page_size=64, **options),
        nbytes=t * (1024 + 584 + 264),
    )
    recorder.record(
        "v4_gather",
        f"t={t}",
        "portable",
        lambda: kernels.v4_gather(planar, slots, torch.bfloat16, page_size=64),
        nbytes=t * (1024 + 584),
    )


def run_output(recorder: Recorder) -> None:
    """The grouped output projection with the rotation back, and Engram's gate."""
    weight = (torch.randn(8, 1024, 4096, device="cuda") * 0.02).bfloat16()
    for t in (8, 64, 1024):
        attended = torch.randn(t, 64, 512, device="cuda").bfloat16()
        table = (torch.randn(t, 32, device="cuda"), torch.randn(t, 32, device="cuda"))
        size = {"nbytes": weight.numel() * 2 + t * (65536 + 16384), "flops": 2 * t * weight.numel()}
        recorder.record(
            "grouped_output",
            f"t={t}",
            "portable",
            lambda: kernels.grouped_output(attended, weight, table, inplace=True),
            **size,
        )
        recorder.record(
            "rope, bmm, copy",
            f"t={t}",
            "torch",
            lambda: (
                torch.bmm(
                    kernels.rope(attended, table, inverse=True, inplace=True).view(t, 8, 4096).transpose(0, 1),
                    weight.transpose(1, 2),
                )
                .transpose(0, 1)
                .reshape(t, 8192)
            ),
            **size,
        )
    q_weight, k_weight = torch.randn(4, D, device="cuda").bfloat16(), torch.randn(4, D, device="cuda").bfloat16()
    for t in (64, 4096):
        streams, projected = (
            torch.randn(t, 4, D, device="cuda").bfloat16(),
            torch.randn(t, 5 * D, device="cuda").bfloat16(),
        )
        recorder.record(
            "engram_gate",
            f"t={t}",
            "portable",
            lambda: kernels.engram_gate(streams, projected, q_weight, k_weight, eps=1e-20),
            nbytes=t * D * 2 * 13,
        )


def run_vocab(recorder: Recorder) -> None:
    """Markov head, bitmask and sampling over the vocabulary."""
    logits = torch.randn(64, VOCAB, device="cuda")
    embed, head = torch.randn(VOCAB, 256, device="cuda").bfloat16(), torch.randn(VOCAB, 256, device="cuda").bfloat16()
    previous = torch.randint(0, VOCAB, (64,), device="cuda")
    recorder.record(
        "markov_step",
        "b=64 rank=256",
        "portable",
        lambda: kernels.markov_step(logits, previous, embed, head),
        nbytes=VOCAB * 512 + 64 * VOCAB * 8,
        flops=2 * 64 * VOCAB * 256,
    )
    mask = torch.randint(-(2**31), 2**31, (64, VOCAB // 32), device="cuda").int()
    scratch = logits.clone()
    recorder.record(
        "apply_bitmask", "64 rows", "portable", lambda: kernels.apply_bitmask(scratch, mask), nbytes=64 * VOCAB * 2
    )
    temperature = torch.full((64,), 0.7, device="cuda")
    numbers = torch.rand(64, dtype=torch.float64, device="cuda")
    top_k, top_p = torch.full((64,), 50, device="cuda"), torch.full((64,), 0.9, device="cuda")
    for name, options in (("T=0.7", {}), ("top_k=50", {"top_k": top_k}), ("top_p=0.9", {"top_p": top_p})):
        recorder.record(
            "sample",
            f"64 rows {name}",
            "portable",
            lambda: kernels.sample(logits, temperature, numbers, **options),
            nbytes=64 * VOCAB * 4,
        )
    recorder.record(
        "sample",
        "64 rows greedy",
        "portable",
        lambda: kernels.sample(logits, temperature * 0, numbers),
        nbytes=64 * VOCAB * 4,
    )
    recorder.record("argmax (torch)", "64 rows", "torch", lambda: logits.argmax(-1), nbytes=64 * VOCAB * 4)
    _verify(recorder)


def _verify(recorder: Recorder) -> None:
    """16 sequences, 5 drafts each."""
    target = torch.randn(16, 6, VOCAB, device="cuda").softmax(-1)
    proposal = torch.randn(16, 5, VOCAB, device="cuda").softmax(-1)
    guesses = torch.randint(0, VOCAB, (16, 5), device="cuda")
    counts, seeds = torch.full((16,), 5, device="cuda"), torch.arange(16, device="cuda")
    for method, read in (("coupled", 16 * 6), ("standard", 2 * 16), ("block", 2 * 16 * 5)):
        recorder.record(
            "verify_drafts",
            f"16x5 {method}",
            "portable",
            lambda: kernels.verify_drafts(guesses, counts, target, seeds, seeds, proposal, method),
            nbytes=read * VOCAB * 4,
        )


def run_gqa(recorder: Recorder) -> None:
    """SmolLM2's attention: 9 heads over 3 of width 64, and a Llama-8B-like 32 over 8 of 128."""
    for name, heads, kv, d in (("smollm2", 9, 3, 64), ("llama 8B", 32, 8, 128)):
        for sequences, chunk, length in ((256, 1, 640), (64, 1, 2048), (8, 512, 512), (1, 1, 8192)):
            size = 16
            pages = sequences * length // size
            keys = torch.randn(pages, size, kv, d, device="cuda").bfloat16()
            values = torch.randn_like(keys)
            table = torch.randperm(pages, device="cuda").int().view(sequences, -1)
            starts = torch.arange(0, sequences * chunk + 1, chunk, device="cuda").int()
            lens = torch.full((sequences,), length, device="cuda").int()
            rows = torch.arange(sequences, device="cuda").int()
            qkv = torch.randn(sequences * chunk, (heads + 2 * kv) * d, device="cuda").bfloat16()
            q = qkv.view(len(qkv), -1, d)[:, :heads]
            rope = torch.randn(length, 2, d // 2, device="cuda")
            slots = table[:, -1].long() * size + size - 1
            arrived = kernels.arrivals("cuda")
            pairs = chunk * length - chunk * (chunk - 1) // 2
            nbytes, flops = sequences * length * kv * d * 4 + q.numel() * 4, 4 * sequences * pairs * heads * d
            where = (keys, values, table, rows, starts, lens)
            shape = f"{name} {sequences}x{chunk} of {length}"

            def attend() -> torch.Tensor:
                return kernels.paged_gqa(q, *where, scale=d**-0.5, max_queries=chunk, arrived=arrived)

            def decode() -> torch.Tensor:
                return kernels.rope_gqa(qkv, rope, slots, *where, heads=heads, scale=d**-0.5, arrived=arrived)

            recorder.record("paged_gqa", shape, "portable", attend, nbytes=nbytes, flops=flops)
            if chunk == 1:
                recorder.record("rope_gqa", shape, "portable", decode, nbytes=nbytes, flops=flops)


def measure(recorder: Recorder) -> None:
    """Everything."""
    for part in (run_mhc, run_router, run_indexer, run_rows, run_output, run_vocab, run_gqa):
        part(recorder)
        torch.cuda.empty_cache()


def run(argv: list[str]) -> int:
    return record_case("ops", measure, argv)


if __name__ == "__main__":
    import sys

    raise SystemExit(run(sys.argv[1:]))
