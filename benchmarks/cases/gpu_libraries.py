# Third-party modules and kernels whose arguments no type checker knows.
# pyrefly: ignore-errors
"""Beside FlashMLA and DeepGEMM (the user's own, or vLLM's copies): each checked, then timed in one run with our nearest op.

`python benchmarks/cases/gpu_libraries.py PART... [--warm-up [WHAT]]`, parts: table, decode, prefill, product, indexer, dense,
experts, seam. What differs in format stands in the row. Libraries are called as an engine would: lists prepared, FlashMLA's
schedule kept between calls. A warm-up only compiles.
"""

from __future__ import annotations

import argparse
import sys

import deepinfer_kernels_cuda as kernels
import torch
from deepinfer_kernels_cuda import attention, experts
from deepinfer_kernels_cuda.reference import attention as reference
from gpu_attention import make_case
from gpu_bench import Recorder, relative_error
from gpu_ways import LibraryMissingError, Rows, library

SCALE = 512**-0.5


def table(_rows: Rows) -> None:
    """What serves this device, by the package's own tables."""
    for row in kernels.capability_table("cuda"):
        print(f"{row.op:20s} {row.kernel or '-':10s} {row.reason or row.note}")
    for row in kernels.library_table("cuda"):
        print(f"{row.library:10s} {row.op:22s} {row.copy or '-'} | {row.reason or row.note}")


# --- sparse attention -----------------------------------------------------------------------------------------------


def wide_pool(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """V3.2's records of 576 channels: 512 e4m3, four float32 scales, 64 bfloat16; [pages, 64, 1, 656] and values."""
    values = torch.randn(rows, 576, device="cuda")
    groups = values[:, :512].unflatten(1, (4, 128))
    scale = torch.exp2((groups.abs().amax(-1) / 448).log2().ceil())
    codes = (groups / scale[..., None]).to(torch.float8_e4m3fn)
    tail = values[:, 512:].bfloat16()
    exact = torch.cat(((codes.float() * scale[..., None]).flatten(1), tail.float()), 1)
    parts = (
        codes.flatten(1).view(torch.uint8),
        scale.contiguous().view(torch.uint8),
        tail.contiguous().view(torch.uint8),
    )
    return torch.cat(parts, 1).view(-1, 64, 1, 656), exact


def planar_pool(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """V4's records: a pool of pages of 64, and its values."""
    pool = torch.zeros(rows // 64, 37440, dtype=torch.uint8, device="cuda")
    slots = torch.arange(rows, device="cuda")
    for part in slots.split(16384):
        kernels.v4_insert(pool, part, torch.randn(len(part), 512, device="cuda").bfloat16(), page_size=64)
    return pool, kernels.v4_gather(pool, slots, torch.float32, page_size=64)


def attend(q, values, slots, sink) -> torch.Tensor:
    """Float32 attention of at most 64 queries, values being the first 512 channels of a key."""
    q, keys = q[:64].float(), values[slots[:64].long()]
    logits = torch.einsum("thn,tkn->thk", q, keys) * q.shape[-1] ** -0.5
    logits = torch.cat((logits, sink[None, :, None].expand(len(q), -1, 1)), -1)
    return torch.einsum("thk,tkn->thn", logits.softmax(-1)[..., :-1], keys[..., :512])


def decode(rows: Rows) -> None:
    """Sparse decode: 640 keys a query as V4.1 has, and the 128 heads and 2,048 keys that FlashMLA was made for."""
    flash = library("flash_mla")
    shapes = (
        (1, 64, 640),
        (16, 64, 640),
        (64, 64, 640),
        (128, 64, 640),
        (256, 64, 640),
        (64, 128, 640),
        (128, 128, 2048),
    )
    for b, heads, keys in shapes:
        shape, flops = f"b={b} h={heads} keys={keys}", b * heads * keys * 512 * 4
        io, total = b * heads * 2048, max(b * keys, 4096)
        for window, selected in ((128, keys - 128), (keys, 0)):
            case = make_case(b, heads, window=window, selected=selected)
            want = reference.sparse_mla_decode(**case, dtype=torch.float32)[0]
            rows.add("ours", shape, f"528 B x {window} + 288 B x {selected}",
                     lambda case=case: attention.sparse_mla_decode(**case, kernel="sm90"),
                     nbytes=io + b * (window * 528 + selected * 288), flops=flops,
                     check=lambda out, want=want: relative_error(out, want))  # fmt: skip
        sink = case["sink"]
        slots = torch.randperm(total, device="cuda")[: b * keys].view(b, 1, keys).int()

        pool, values = planar_pool(total)
        cache = pool.as_strided((len(pool), 64, 1, 584), (37440, 584, 584, 1))
        q = case["q"].unsqueeze(1)
        want = attend(q[:, 0], values, slots[:, 0], sink)
        check = lambda out, want=want: relative_error(out[0][:64, 0], want)  # noqa: E731
        one, two = flash.get_mla_metadata()[0], flash.get_mla_metadata()[0]
        first, rest = slots[..., :128].contiguous(), slots[..., 128:].contiguous()
        common = {"softmax_scale": SCALE, "is_fp8_kvcache": True, "attn_sink": sink}
        rows.add("FlashMLA", shape, f"584 B x {keys} (V4)",
                 lambda: flash.flash_mla_with_kvcache(q, cache, None, None, 512, one, indices=slots, **common),
                 nbytes=io + b * keys * 584, flops=flops, check=check)  # fmt: skip
        rows.add("FlashMLA", shape, f"584 B x 128 + {keys - 128} (V4)",
                 lambda: flash.flash_mla_with_kvcache(q, cache, None, None, 512, two, indices=first, extra_k_cache=cache,
                                                      extra_indices_in_kvcache=rest, **common),
                 nbytes=io + b * keys * 584, flops=flops, check=check)  # fmt: skip

        pool, values = wide_pool(total)
        wide = torch.randn(b, 1, heads, 576, device="cuda").bfloat16()
        plan = flash.get_mla_metadata()[0]
        rows.add("FlashMLA", shape, f"656 B x {keys} (V3.2)",
                 lambda: flash.flash_mla_with_kvcache(wide, pool, None, None, 512, plan, indices=slots,
                                                      **(common | {"softmax_scale": 576**-0.5})),
                 nbytes=io + b * (heads * 128 + keys * 656), flops=b * heads * keys * (576 + 512) * 2,
                 check=lambda out: relative_error(out[0][:64, 0], attend(wide[:, 0], values, slots[:, 0], sink)))  # fmt: skip


def prefill(rows: Rows) -> None:
    """Sparse prefill of 4,096 tokens, 64 heads, 640 keys."""
    flash, t = library("flash_mla"), 4096
    shape, flops, io = f"t={t} h=64 keys=640", t * 64 * 640 * 2048, t * 64 * 2048
    case = make_case(t, 64, distinct=False)
    part = {k: v[:64] if k in ("q", "window_slots", "compressed_slots") else v for k, v in case.items()}
    want = reference.sparse_mla_decode(**part, dtype=torch.float32)[0]
    rows.add("ours", shape, "from records, 528 + 288 B", lambda: attention.sparse_mla_decode(**case, kernel="sm90"),
             nbytes=io + 32768 * 288 + 4096 * 528, flops=flops,
             check=lambda out: relative_error(out[:64], want))  # fmt: skip
    q, sink = case["q"], case["sink"]
    lists = torch.cat((case["window_slots"], case["compressed_slots"] + 4096), 1)
    sources = (("window_pool", "fp8"), ("compressed_pool", "nvfp4"))
    parts = [(case[name], torch.arange(len(case[name]), device="cuda"), fmt) for name, fmt in sources]

    def through_workspace() -> torch.Tensor:
        records = torch.cat([kernels.kv_gather(*part, 512, torch.bfloat16) for part in parts])
        return attention.sparse_mla_prefill(q, records, lists, sink, scale=SCALE, kernel="flash_mla")

    rows.add("FlashMLA", shape, "all records to a workspace first", through_workspace,
             nbytes=io + 32768 * 288 + 4096 * 528, flops=flops,
             check=lambda out: relative_error(out[:64], want))  # fmt: skip
    kv = torch.randn(36864, 512, device="cuda").bfloat16()
    exact = attend(q, kv.float(), lists, sink)
    common = {"nbytes": io + kv.numel() * 2, "flops": flops}
    for few in (1, 8, 64, 512, t):
        for kernel in ("portable", "flash_mla"):
            rows.add("sparse_mla_prefill", f"t={few} h=64 keys=640", f"workspace, {kernel}",
                     lambda: attention.sparse_mla_prefill(q[:few], kv, lists[:few], sink, scale=SCALE, kernel=kernel),
                     nbytes=few * 64 * 2048 + min(few * 640, len(kv)) * 1024, flops=few * 64 * 640 * 2048,
                     check=lambda out: relative_error(out[:64], exact[:few]))  # fmt: skip
    ready = lists.unsqueeze(1).contiguous()
    rows.add("FlashMLA", shape, "workspace, 512 wide",
             lambda: flash.flash_mla_sparse_fwd(q, kv.unsqueeze(1), ready, SCALE, 512, sink),
             check=lambda out: relative_error(out[0][:64], exact), **common)  # fmt: skip
    wide_q, wide = torch.randn(t, 64, 576, device="cuda").bfloat16(), torch.randn(36864, 576, device="cuda").bfloat16()
    rows.add("FlashMLA", shape, "workspace, 576 wide",
             lambda: flash.flash_mla_sparse_fwd(wide_q, wide.unsqueeze(1), ready, 576**-0.5, 512, sink),
             nbytes=t * 64 * 2176 + wide.numel() * 2, flops=t * 64 * 640 * 1088 * 2,
             check=lambda out: relative_error(out[0][:64], attend(wide_q, wide.float(), lists, sink)))  # fmt: skip


# --- products -------------------------------------------------------------------------------------------------------


def product(rows: Rows) -> None:
    """The router's product, bfloat16 to float32: cuBLAS and DeepGEMM."""
    from deepinfer_kernels_cuda.libraries import deep_gemm_product

    library("deep_gemm")
    for t in (512, 1024, 4096):
        x, w = (torch.randn(n, 5120, device="cuda").bfloat16() for n in (t, 384))
        want = x.float() @ w.float().t()
        common = {"nbytes": (t + 384) * 10240 + t * 1536, "flops": 2 * t * 5120 * 384}
        check = lambda out, want=want: relative_error(out, want)  # noqa: E731
        rows.add("router product", f"{t}x384x5120", "cuBLAS", lambda: torch.mm(x, w.t(), out_dtype=torch.float32),
                 check=check, **common)  # fmt: skip
        rows.add("router product", f"{t}x384x5120", "DeepGEMM", lambda: deep_gemm_product(x, w), check=check, **common)


def fp8_rows(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random e4m3 rows with a float32 scale for 128 channels, as DeepGEMM takes activations."""
    codes = torch.randn(*shape, device="cuda").to(torch.float8_e4m3fn)
    return codes, torch.rand(*shape[:-1], shape[-1] // 128, device="cuda") + 0.5


def fp8_blocks(n: int, k: int, count: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random e4m3 weights with a float32 scale for 128 x 128; `count` matrices where given."""
    codes = torch.empty(max(count, 1), n, k, dtype=torch.float8_e4m3fn, device="cuda")
    for one in codes:
        one.copy_(torch.randn(n, k, device="cuda"))
    scale = torch.rand(max(count, 1), n // 128, k // 128, device="cuda") * 0.01 + 0.005
    return (codes, scale) if count else (codes[0], scale[0])


def fp8_reference(a, b) -> torch.Tensor:
    """Float32 product of decoded values, [m, k] by [n, k]."""
    left = (a[0].float().unflatten(-1, (-1, 128)) * a[1][..., None]).flatten(-2)
    scale = b[1].repeat_interleave(128, 0).repeat_interleave(128, 1)
    return left @ (b[0].float() * scale).t()


def dense(rows: Rows) -> None:
    """`wo_b`: MXFP8 weights with bfloat16 activations, FP8 with FP8, bfloat16 with bfloat16."""
    from deepinfer_kernels_cuda import weights as mx

    gemm = library("deep_gemm")
    n, k = 5120, 8192
    raw = torch.randint(0, 0x77, (1, n, k), dtype=torch.uint8, device="cuda")
    natural = mx.mx_weights(raw, torch.full((1, n, k // 32), 118, dtype=torch.uint8, device="cuda"), fp4=False)
    packed, plain = mx.pack_sm90(natural), torch.randn(n, k, device="cuda").bfloat16()
    w = fp8_blocks(n, k)
    for t in (8, 64, 1024, 4096):
        x, shape, flops = torch.randn(t, k, device="cuda").bfloat16(), f"wo_b t={t} {n}x{k}", 2 * t * n * k
        rows.add("ours", shape, "MXFP8 x bf16", lambda: kernels.mx_linear(x, packed),
                 nbytes=n * k * 33 / 32 + t * (n + k) * 2, flops=flops)  # fmt: skip
        rows.add("cuBLAS", shape, "bf16 x bf16", lambda: x @ plain.t(), nbytes=2 * (n * k + t * (n + k)), flops=flops)
        a = fp8_rows(t, k)
        want, out = fp8_reference((a[0][:64], a[1][:64]), w), torch.empty(t, n, dtype=torch.bfloat16, device="cuda")
        a = (a[0], gemm.utils.get_mn_major_tma_aligned_tensor(a[1]))
        rows.add("DeepGEMM", shape, "FP8 x FP8 (128)", lambda: gemm.fp8_gemm_nt(a, w, out) or out,
                 nbytes=n * k + t * (2 * n + k), flops=flops,
                 check=lambda out, want=want: relative_error(out[:64], want))  # fmt: skip


def grouped_experts(rows: Rows) -> None:
    """Experts of 5120 x 2304: our whole op (grouping, both products, activation, sum) beside DeepGEMM's two products alone."""
    from gpu_experts import HIDDEN, INTER, TOP_K, expert_bytes, make_experts, route

    gemm = library("deep_gemm")
    aligned = gemm.utils.get_mn_major_tma_aligned_tensor
    for count, t in ((64, 4096), (384, 64)):
        ids, gates = route(t, count)
        counts = ids.flatten().bincount(minlength=count)
        flops, active = t * TOP_K * 3 * INTER * HIDDEN * 2, int((counts > 0).sum())
        shape = f"t={t} {active}/{count} experts"
        if rows.ours:
            packed = make_experts(count)[1]
            x = torch.randn(t, HIDDEN, device="cuda").bfloat16()
            rows.add("ours", shape, "MXFP4 x bf16, the whole op",
                     lambda: experts.moe_experts(x, ids, gates, packed, limit=10.0),
                     nbytes=active * expert_bytes() + t * HIDDEN * 4, flops=flops)  # fmt: skip
            del packed
        for name, n, k in (("up", 2 * INTER, HIDDEN), ("down", HIDDEN, INTER)):
            w = fp8_blocks(n, k, count)
            few = 2 * t * TOP_K * n * k
            if t < count:  # decode: room for 64 rows an expert
                a = fp8_rows(count, 64, k)
                out, filled = torch.empty(count, 64, n, dtype=torch.bfloat16, device="cuda"), counts.int()
                most = int(counts.argmax())
                want = fp8_reference((a[0][most], a[1][most]), (w[0][most], w[1][most]))[: int(counts[most])]
                a = (a[0], aligned(a[1]))
                call = lambda a=a, w=w, out=out, filled=filled: (  # noqa: E731
                    gemm.m_grouped_fp8_gemm_nt_masked(a, w, out, filled, 1) or out
                )
                check = lambda out, most=most, want=want: relative_error(out[most, : len(want)], want)  # noqa: E731
            else:
                unit = gemm.utils.get_mk_alignment_for_contiguous_layout()
                size = -(-counts // unit) * unit
                layout = torch.arange(count, device="cuda").repeat_interleave(size).int()
                a = fp8_rows(len(layout), k)
                few_rows = slice(0, int(counts[0]))
                want = fp8_reference((a[0][few_rows], a[1][few_rows]), (w[0][0], w[1][0]))
                out = torch.empty(len(layout), n, dtype=torch.bfloat16, device="cuda")
                a = (a[0], aligned(a[1]))
                call = lambda a=a, w=w, out=out, layout=layout: (  # noqa: E731
                    gemm.m_grouped_fp8_gemm_nt_contiguous(a, w, out, layout) or out
                )
                check = lambda out, want=want: relative_error(out[: len(want)], want)  # noqa: E731
            rows.add("DeepGEMM", shape, f"FP8 x FP8, {name} alone", call,
                     nbytes=active * n * k + t * TOP_K * (2 * n + k), flops=few, check=check)  # fmt: skip
            del w, a, out
            if t >= count:
                w = torch.randn(count, n, k, device="cuda", dtype=torch.bfloat16)
                a = torch.randn(len(layout), k, device="cuda", dtype=torch.bfloat16)
                out = torch.empty(len(layout), n, dtype=torch.bfloat16, device="cuda")
                want = a[few_rows].float() @ w[0].float().t()
                rows.add("DeepGEMM", shape, f"bf16 x bf16, {name} alone",
                         lambda: gemm.m_grouped_bf16_gemm_nt_contiguous(a, w, out, layout) or out,
                         nbytes=active * n * k * 2 + t * TOP_K * (n + k) * 2, flops=few,
                         check=lambda out: relative_error(out[: len(want)], want))  # fmt: skip
                del w, a, out


def indexer(rows: Rows) -> None:
    """64 queries of 32 heads over 65,536 paged keys each: MXFP4 keys (ours), FP8 keys (DeepGEMM)."""
    from deepinfer_kernels_cuda.reference import records

    gemm = library("deep_gemm")
    t, entries, pages = 64, 65536, 16384
    table = torch.stack([torch.randperm(pages, device="cuda")[: entries // 64] for _ in range(t)]).int()
    flops = 2 * t * entries * 32 * 128
    if rows.ours:
        pool = torch.randint(0, 256, (pages, 64, 68), dtype=torch.uint8, device="cuda")
        pool[..., 64:] = torch.randint(118, 124, (pages, 64, 4), dtype=torch.uint8, device="cuda")
        rounded, index = records.new_pool(t * 32, "mxfp4", 128, "cuda"), torch.arange(t * 32, device="cuda")
        records.kv_insert(rounded, index, torch.randn(t * 32, 128, device="cuda"), "mxfp4")
        q = kernels.kv_gather(rounded, index, "mxfp4", 128, torch.bfloat16).view(t, 32, 128)
        weights = torch.randn(t, 32, device="cuda").bfloat16()
        visible = torch.full((t,), entries, dtype=torch.int32, device="cuda")
        owners = torch.arange(t, device="cuda", dtype=torch.int32)
        rows.add("ours", "q=64 entries=65536 h=32", "MXFP4 keys of 68 B, bf16 q",
                 lambda: kernels.indexer_logits(q, weights, pool, table, owners, visible, max_entries=entries),
                 nbytes=t * entries * 72, flops=flops)  # fmt: skip
    codes = torch.randn(pages, 64, 128, device="cuda").to(torch.float8_e4m3fn)
    scale = torch.rand(pages, 64, device="cuda") + 0.5
    cache = torch.cat((codes.view(torch.uint8).flatten(1), scale.view(torch.uint8)), 1).view(pages, 64, 1, 132)
    q = torch.randn(t, 1, 32, 128, device="cuda").to(torch.float8_e4m3fn)
    weights = torch.randn(t, 32, device="cuda")
    lengths = torch.full((t, 1), entries, dtype=torch.int32, device="cuda")
    plan = gemm.get_paged_mqa_logits_metadata(lengths, 64, gemm.get_num_sms())
    keys = (codes.float() * scale[..., None])[table[5].long()].flatten(0, 1)
    want = ((q[5, 0].float() @ keys.t()).relu() * weights[5][:, None]).sum(0)
    rows.add("DeepGEMM", "q=64 entries=65536 h=32", "FP8 keys of 132 B, FP8 q",
             lambda: gemm.fp8_fp4_paged_mqa_logits((q, None), cache, weights, lengths, table, plan, entries),
             nbytes=t * entries * 136, flops=flops, check=lambda out: relative_error(out[5], want))  # fmt: skip


def seam(rows: Rows) -> None:
    """The product of hyper-connections: DeepGEMM's alone beside our whole seam (update, norm, coefficients, Sinkhorn)."""
    from gpu_rows import mhc_inputs

    gemm = library("deep_gemm")
    for t, splits in ((64, 16), (4096, 1)):
        tensors, options = mhc_inputs(t, 5120)
        rows.add("ours", f"t={t}", "the whole seam", lambda: kernels.mhc_step(*tensors, **options),
                 nbytes=t * 5120 * 20)  # fmt: skip
        streams, fn = tensors[0].flatten(1), tensors[1].contiguous()
        out = torch.empty(splits, t, 24, device="cuda")
        squares = torch.empty(splits, t, device="cuda")
        rows.add("DeepGEMM", f"t={t}", f"product alone, {splits} splits",
                 lambda: gemm.tf32_hc_prenorm_gemm(streams, fn, out, squares, splits) or out.sum(0),
                 nbytes=t * 20480 * 2, check=lambda out: relative_error(out, streams.double() @ fn.double().t()))  # fmt: skip


PARTS = {"table": table, "decode": decode, "prefill": prefill, "product": product, "indexer": indexer, "dense": dense,
         "experts": grouped_experts, "seam": seam}  # fmt: skip


def run(argv: list[str]) -> int:
    """Time parts beside the libraries. Returns 1 if a line failed, 2 if a library of a part is not here."""
    parser = argparse.ArgumentParser(prog="deepinfer bench gpu-libraries", description=__doc__)
    parser.add_argument("parts", choices=PARTS, nargs="+")
    parser.add_argument(
        "--warm-up", nargs="?", const="all", help="compile only: all that DeepGEMM needs, or one call of a part"
    )
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    recorder = None if options.warm_up else Recorder("libraries_" + "_".join(options.parts))
    rows, missing = Rows(recorder, options.warm_up), 0
    for part in options.parts:
        rows.calls = 0
        try:
            PARTS[part](rows)
        except LibraryMissingError as reason:
            missing += 1
            print(f"cannot run: {part} needs {reason}", file=sys.stderr, flush=True)
        except Exception as failure:  # of one part; the others are timed
            rows.failed += 1
            print(f"{part} FAILED {type(failure).__name__}: {str(failure)[:400]}", flush=True)
    if recorder:
        recorder.save()
        rows.failed += recorder.failed
    return 1 if rows.failed else 2 if missing else 0


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:]))
