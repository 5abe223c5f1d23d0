"""Every kernel as data: argument types, constants and limits, so that each can be compiled without a GPU.

`python -m deepinfer_kernels_cuda.catalogue [names...]` compiles all of them (or those named) for their architectures, prints a
report a line and fails on the first broken limit. It says that a kernel compiles, never that it runs.
"""

from __future__ import annotations

import sys
from typing import Any

from .attention import FEW
from .experts import NARROW, WIDE
from .native import native_reason
from .routing import PARTS
from .specs import KernelSpec, NativeSpec

_MLA = (
    "q=*bf16 q_stride_n=i32 q_stride_h=i32 window=*u8 window_idx=*i32 w_stride_page=i64 w_stride_row=i64 w_idx_stride=i32 "
    "W_KEYS=i32 w_slots=i32 extra=*u8 extra_idx=*i32 x_stride_page=i64 x_stride_row=i64 x_idx_stride=i32 X_KEYS=i32 "
    "x_slots=i32 sink=*fp32 out=*bf16 out_stride_n=i32 out_stride_h=i32 lse=*fp32 heads=i32 scale_log2=fp32 "
)
_MX90 = (
    "x=*bf16 x_stride=i64 weights=*i32 scales=*i32 out={out} out_stride=i64 order=*i32 offsets=*i32 pair_weights=*fp32 N=i32 "
    "K=i32 n_blocks=i32 k_blocks=i32 top_k=i32 limit=fp32"
)
_MX = "x=*bf16 x_stride=i64 codes=*u8 scales=*u8 out=*bf16 out_stride=i64 order=*i32 offsets=*i32 N=i32 K=i32 rows=i32 top_k=i32"
_INSERT = (
    "x=*bf16 stride=i32 weight=*bf16 eps=fp32 cos=*fp32 sin=*fp32 table_stride=i32 slots=*i64 pool=*u8 stride_page=i64 "
    "stride_row=i64 rows=i32"
)
_SEND_ROWS = (
    "x=*i32 ids=*i64 weights=*fp32 places=*i32 counts=*i32 out=*i32 out_ids=*i64 out_weights=*fp32 delta=*i64 "
    "tokens=i32 width=i32 x_stride=i32 out_stride=i32 ids_stride=i32 weights_stride=i32 local=i32 ranks=i32 me=i32 "
    "begin_rank=i32 end_rank=i32 skip=i32 first=i32 apart=i32 own_rows=i32"
)
_MHC_STREAM = (
    "streams=*bf16 output=*bf16 post=*fp32 comb=*fp32 pre=*fp32 fn=*bf16 new_streams=*bf16 out=*bf16 part=*fp32 squares=*fp32 "
    "tokens=i32 d=i32 spans=i32 tiles=i32"
)
_DENSE = (
    "x=*bf16 x_stride=i32 weight=*bf16 w_stride=i32 norm_weight=*bf16 eps=fp32 squares_in=*fp32 residual=*bf16 "
    "residual_stride=i32 out=*bf16 out_stride=i32 next_weight=*bf16 scaled=*bf16 squares_out=*fp32 rows=i32 parts=i32"
)
_GQA = (
    "q=*bf16 q_stride_t=i32 q_stride_h=i32 keys=*bf16 values=*bf16 k_stride_b=i64 k_stride_r=i64 k_stride_h=i64 "
    "v_stride_b=i64 v_stride_r=i64 v_stride_h=i64 table=*i32 table_stride=i32 table_rows=*i32 query_starts=*i32 "
    "seq_lens=*i32 rope=*fp32 slots=*i64 out=*bf16 out_stride_t=i32 out_stride_h=i32 partial=*fp32 lse=*fp32 arrived=*i32 "
    "scale_log2=fp32 splits=i32"
)


def _dense(
    name: str,
    k: int,
    n: int,
    kind: str,
    *,
    rows: int,
    outputs: int,
    inputs: int = 64,
    warps: int = 4,
    stages: int = 4,
    **more: Any,
) -> KernelSpec:
    norm = {"add": 0, "norm": 2, "swiglu": 3}[kind]
    constants = {"N": n, "K": k, "NORM": norm, "SWIGLU": kind == "swiglu", "ADD": kind == "add", "SCALE": kind == "add",
                 "BM": rows, "BN": outputs, "BK": inputs, "LINE": 64, "LINES": 32, "PARTS": 32}  # fmt: skip
    return KernelSpec(f"dense_{name}", "kernels.dense:dense_linear_kernel", _DENSE, constants, min_mma=2,
                      options={"num_warps": warps, "num_stages": stages}, **more)  # fmt: skip


def _mx90(fp4: bool, grouped: bool, swiglu: bool, bn: int, bt: int, split_k: int = 1, **more: Any) -> KernelSpec:
    constants = {"FP4": fp4, "GROUPED": grouped, "GATHER": grouped and swiglu, "SCATTER": grouped and not swiglu,
                 "SWIGLU": swiglu, "SPLIT_K": split_k, "BN": bn, "BT": bt, "STAGES": 5 if bt == 16 else 3}  # fmt: skip
    name = f"sm90_mx_gemm_{'fp4' if fp4 else 'fp8'}_{'grouped' if grouped else 'dense'}{'_swiglu' if swiglu else ''}_{bn}x{bt}"
    types = _MX90.format(out="*fp32" if split_k > 1 else "*bf16")
    return KernelSpec(name, "sm90.mx_gemm:sm90_mx_gemm_kernel", types, constants, (90,), {"num_warps": 4}, ("N", "K"),
                      min_mma=8, max_stack=64, **more)  # fmt: skip


def _insert(name: str, code: int, group: int, floor: float) -> KernelSpec:
    constants = {"NORM": True, "PAIRS": 32, "FORMAT": code, "PAGE": 1, "GROUP": group, "FLOOR": floor, "WIDTH": 512, "D": 512,
                 "ROWS": 2, "ALIGN": 16, "HARDWARE": True}  # fmt: skip
    return KernelSpec(f"norm_rope_insert_{name}", "kernels.rows:insert_kernel", _INSERT, constants, options={"num_warps": 1},
                      quick=name == "fp8")  # fmt: skip


def _gather(name: str, code: int, group: int) -> KernelSpec:
    constants = {
        "PAGE": 1,
        "FORMAT": code,
        "GROUP": group,
        "WIDTH": 512,
        "D": 512,
        "ROWS": 8,
        "ALIGN": 16,
        "HARDWARE": True,
    }
    types = "pool=*u8 slots=*i64 count=i32 pool_slots=i32 out=*bf16 stride_page=i64 stride_row=i64"
    return KernelSpec(f"kv_gather_{name}", "kernels.rows:gather_kernel", types, constants)


_NATIVE: tuple[NativeSpec, ...] = (
    NativeSpec("sparse_mla-1", "sparse_mla.cu", 227 * 1024, ("SPLITS=1",), min_mma=88, max_stack=32),
    NativeSpec("sparse_mla-2", "sparse_mla.cu", 227 * 1024, ("SPLITS=2",), min_mma=88, quick=True),
    NativeSpec("sparse_mla-4", "sparse_mla.cu", 227 * 1024, ("SPLITS=4",), min_mma=88),
    NativeSpec("sparse_mla-8", "sparse_mla.cu", 227 * 1024, ("SPLITS=8",), min_mma=88),
    *(
        NativeSpec(
            f"sparse_mla_few-{few.splits}-{few.heads}",
            "sparse_mla_few.cu",
            few.shared,
            few.defines,
            min_mma=64,
            quick=few is FEW[0],
        )
        for few in FEW
    ),
    NativeSpec("indexer_logits", "indexer.cu", 37 * 1024, ("BLOCKS=6", "STAGES=3"), min_mma=20, quick=True),
    *(
        NativeSpec(f"router_select-{items}", "router.cu", defines=(f"ITEMS={items}",), quick=items == 12)
        for items in (4, 8, 12, 16)
    ),
    *(
        NativeSpec(
            f"router_select-parts-{parts}", "router.cu", defines=("ITEMS=12", f"PARTS={parts}"), quick=parts == 4
        )
        for parts in PARTS[1:]
    ),
    NativeSpec("router_select-odd", "router.cu", defines=("ITEMS=16", "PARTS=10", "TOP=32", "WHOLE=0")),
    NativeSpec("router_product-parts", "router_product.cu", 101 * 1024, ("SELECTS=0",), min_mma=4),
    NativeSpec("router_product-selects", "router_product.cu", 101 * 1024, ("SELECTS=1",), min_mma=4, quick=True),
    NativeSpec("topk-256", "topk.cu", 84 * 1024, ("THREADS=256", "MOST_BLOCKS=1"), quick=True),
    NativeSpec("topk-1024-2", "topk.cu", 84 * 1024, ("THREADS=1024", "MOST_BLOCKS=2"), max_stack=96),
    NativeSpec("topk-1024-8", "topk.cu", 84 * 1024, ("THREADS=1024", "MOST_BLOCKS=8"), max_stack=176),
    NativeSpec("experts_up-narrow", "experts.cu", NARROW.shared, NARROW.defines, min_mma=192),
    NativeSpec("experts_down-narrow", "experts.cu", NARROW.shared, NARROW.defines, min_mma=192),
    NativeSpec("experts_up-wide", "experts.cu", WIDE.shared, WIDE.defines, min_mma=112),
    NativeSpec("experts_down-wide", "experts.cu", WIDE.shared, WIDE.defines, min_mma=112),
    NativeSpec("gather_rows", "experts.cu", 0, WIDE.defines),
    NativeSpec("mhc_step", "mhc.cu", 222360, min_mma=24, quick=True),
    NativeSpec("mhc_step-4096", "mhc.cu", 179720, ("GROUPS=8",), min_mma=24),
    NativeSpec("insert_records-fp8", "records.cu", defines=("FORMAT=0",), quick=True),
    NativeSpec("insert_records-nvfp4", "records.cu", defines=("FORMAT=1",)),
    NativeSpec("insert_records-v4", "records.cu", defines=("FORMAT=3",)),
)

SPECS: tuple[KernelSpec | NativeSpec, ...] = (
    *(() if native_reason() else _NATIVE),
    _mx90(True, True, True, 64, 16, quick=True),
    _mx90(True, True, False, 64, 16),
    _mx90(True, True, True, 128, 64),
    _mx90(True, True, False, 128, 64),
    _mx90(False, False, False, 64, 16, 4),
    _mx90(False, False, False, 64, 64),
    KernelSpec("sparse_mla_portable", "kernels.sparse_mla:sparse_mla_kernel", _MLA, {
        "W_PAGE": 1, "X_PAGE": 1, "HAS_SINK": True, "CHANNELS": 512, "D": 512, "BH": 32, "BN": 32},
        options={"num_warps": 8, "num_stages": 1}, min_mma=1, max_stack=4096, quick=True),
    KernelSpec("sparse_mla_workspace", "kernels.sparse_mla:sparse_mla_workspace_kernel",
        "q=*bf16 q_stride_n=i32 q_stride_h=i32 kv=*bf16 kv_stride=i32 kv_rows=i32 indices=*i32 idx_stride=i32 KEYS=i32 "
        "sink=*fp32 out=*bf16 out_stride_n=i32 out_stride_h=i32 lse=*fp32 heads=i32 scale_log2=fp32",
        {"HAS_SINK": True, "CHANNELS": 512, "D": 512, "BH": 64, "BN": 32},
        options={"num_warps": 8, "num_stages": 2}, min_mma=1, max_stack=4096),
    KernelSpec("mx_gemm_fp4_grouped", "kernels.mx_gemm:mx_gemm_kernel", _MX,
        {"FP4": True, "GROUPED": True, "GATHER": True, "SCATTER": False, "BT": 16, "BN": 64, "BK": 64},
        divisible=("K",), min_mma=1, quick=True),
    KernelSpec("mx_gemm_fp8_dense", "kernels.mx_gemm:mx_gemm_kernel", _MX,
        {"FP4": False, "GROUPED": False, "GATHER": False, "SCATTER": False, "BT": 16, "BN": 64, "BK": 64},
        divisible=("K",), min_mma=1),
    KernelSpec("group_pairs", "kernels.mx_gemm:group_pairs_kernel",
        "ids=*i64 pairs=i32 order=*i32 offsets=*i32 experts=i32", {"BLOCK": 512}),
    KernelSpec("number_rows", "kernels.parallel:number_rows_kernel",
        "ids=*i64 places=*i32 counts=*i32 delta=*i64 tokens=i32 local=i32 ranks=i32",
        {"K": 6, "BK": 8, "BLOCK": 512, "PEERS": True}, options={"num_warps": 16}),
    KernelSpec("send_rows", "kernels.parallel:send_rows_kernel", _SEND_ROWS,
        {"K": 6, "BK": 8, "BR": 2, "BLOCK": 1024, "COUNTED": 2, "PADDED": False, "PEERS": True},
        divisible=("width", "x_stride", "out_stride")),
    KernelSpec("send_rows_padded", "kernels.parallel:send_rows_kernel", _SEND_ROWS,
        {"K": 6, "BK": 8, "BR": 2, "BLOCK": 1024, "COUNTED": 0, "PADDED": True, "PEERS": False},
        divisible=("width", "x_stride")),
    KernelSpec("return_rows", "kernels.parallel:return_rows_kernel",
        "y=*i32 ids=*i64 counts=*i32 back=*i32 delta=*i64 width=i32 y_stride=i32 ranks=i32 me=i32 capacity=i32 "
        "most=i32",
        {"K": 6, "BK": 8, "BR": 2, "BLOCK": 1024, "PADDED": True}, divisible=("width", "y_stride")),
    KernelSpec("sum_rows", "kernels.parallel:sum_rows_kernel",
        "y=*bf16 back=*bf16 places=*i32 counts=*i32 out=*bf16 width=i32 y_stride=i32 ranks=i32 me=i32 here=i32 first=i32 "
        "apart=i32",
        {"BR": 2, "BLOCK": 1024, "COUNTED": 1}, divisible=("width", "y_stride")),
    KernelSpec("combine", "kernels.mx_gemm:combine_kernel",
        "parts=*bf16 ids=*i64 shared=*bf16 out=*bf16 out_stride=i32 width=i32",
        {"TOP_K": 6, "HAS_SHARED": True, "BLOCK": 1024}, divisible=("width",)),
    KernelSpec("mhc_row", "kernels.mhc:mhc_row_kernel",
        "streams=*bf16 output=*bf16 post=*fp32 comb=*fp32 pre=*fp32 norm_weight=*bf16 new_streams=*bf16 out=*bf16 "
        "squares=*fp32 d=i32 norm_eps=fp32",
        {"HAS_POST": True, "HAS_COLLAPSE": True, "HAS_NORM": True, "HAS_SQUARE": True, "S": 4, "D": 4096, "REST": 1024},
        options={"num_warps": 4}, divisible=("d",), max_stack=256, quick=True),
    KernelSpec("mhc_stream", "kernels.mhc_stream:mhc_stream_kernel", _MHC_STREAM,
        {"HAS_POST": True, "HAS_COLLAPSE": True, "WARPS": 4}, divisible=("d",), min_mma=48,
        max_stack=64, quick=True),
    KernelSpec("mhc_stream_decode", "kernels.mhc_stream:mhc_stream_kernel", _MHC_STREAM,
        {"HAS_POST": True, "HAS_COLLAPSE": True, "WARPS": 1}, options={"num_warps": 1}, divisible=("d",), min_mma=48,
        max_stack=64),
    KernelSpec("mhc_close", "kernels.mhc_stream:mhc_close_kernel",
        "part=*fp32 squares=*fp32 base=*fp32 scale=*fp32 x=*bf16 weight=*bf16 pre=*fp32 post=*fp32 comb=*fp32 tokens=i32 "
        "spans=i32 d=i32 eps=fp32 mix_eps=fp32 norm_eps=fp32 mix_blocks=i32",
        {"HAS_NORM": True, "ITERATIONS": 20, "SPANS": 128, "D": 4096, "REST": 1024, "WARPS": 4, "TILE": 8},
        divisible=("d",)),
    KernelSpec("mhc_project", "kernels.mhc:mhc_project_kernel",
        "streams=*bf16 fn=*bf16 mix_part=*fp32 tokens=i32 width=i32 rows=i32",
        {"ROWS": 64, "BT": 64, "BK": 64, "SPAN": 640}, options={"num_warps": 4, "num_stages": 4},
        divisible=("width",), min_mma=1, quick=True),
    KernelSpec("mhc_finish", "kernels.mhc:mhc_finish_kernel",
        "mix_part=*fp32 squares=*fp32 base=*fp32 scale=*fp32 pre=*fp32 post=*fp32 comb=*fp32 tokens=i32 d=i32 spans=i32 "
        "iterations=i32 eps=fp32 mix_eps=fp32",
        {"S": 4, "ROWS": 64, "LOW": 32, "SPANS": 32, "BT": 2}, options={"num_warps": 1}),
    KernelSpec("indexer_logits_portable", "kernels.selection:indexer_logits_kernel",
        "q=*bf16 q_stride_t=i32 q_stride_h=i32 weights=*bf16 w_stride=i32 pool=*u8 stride_block=i64 stride_row=i64 table=*i32 "
        "table_stride=i32 table_rows=*i32 visible=*i32 out=*fp32 out_stride=i32 heads=i32 max_entries=i32",
        {"BLOCK": 64, "CHANNELS": 128, "BH": 32, "BN": 128}, min_mma=1, max_stack=1024),
    KernelSpec("topk_chunk", "kernels.selection:topk_chunk_kernel",
        "scores=*fp32 stride=i32 source=*i32 lengths=*i32 width=i32 out_scores=*fp32 out_index=*i32 chunks=i32",
        {"K": 512, "K_BLOCK": 512, "HAS_SOURCE": True, "HAS_LENGTHS": False, "LAST": False, "BLOCK": 4096},
        options={"num_warps": 8}, quick=True),
    KernelSpec("router_logits", "kernels.router:router_logits_kernel",
        "x=*bf16 x_stride=i32 weight=*bf16 part=*fp32 tokens=i32 experts=i32 d=i32",
        {"BT": 64, "BE": 32, "BK": 128, "SPAN": 512}, options={"num_warps": 4, "num_stages": 3},
        divisible=("d",), min_mma=1, max_stack=16),
    KernelSpec("router_select", "kernels.router:router_select_kernel",
        "part=*fp32 bias=*fp32 ids=*i64 gates=*fp32 tokens=i32 experts=i32 spans=i32 scale=fp32",
        {"NORMALISE": True, "K": 6, "E": 512, "W": 8, "SPANS": 16}, options={"num_warps": 2},
        divisible=("experts",)),
    _insert("fp8", 0, 32, 1e-4),
    _insert("nvfp4", 1, 16, 6 * 2.0**-9),
    _insert("mxfp4", 2, 32, 6 * 2.0**-126),
    KernelSpec("latent_insert", "kernels.rows:latent_insert_kernel",
        "both=*bf16 stride=i32 q_weight=*bf16 latent=*bf16 kv_weight=*bf16 eps=fp32 cos=*fp32 sin=*fp32 table_stride=i32 "
        "slots=*i64 pool=*u8 stride_page=i64 stride_row=i64 rows=i32",
        {"Q": 1280, "Q_D": 1024, "Q_REST": 256, "PAIRS": 32, "FORMAT": 0, "PAGE": 1, "GROUP": 32, "FLOOR": 1e-4, "WIDTH": 512,
         "D": 512, "ALIGN": 16, "HARDWARE": True}),
    KernelSpec("rope_round", "kernels.rows:rope_round_kernel",
        "x=*bf16 stride_t=i32 stride_h=i32 out=*bf16 cos=*fp32 sin=*fp32 table_stride=i32 heads=i32",
        {"PAIRS": 32, "FORMAT": 2, "GROUP": 32, "FLOOR": 6 * 2.0**-126, "WIDTH": 128, "D": 128, "ROWS": 8, "HARDWARE": True},
        options={"num_warps": 1}),
    KernelSpec("rope", "kernels.rows:rope_kernel",
        "x=*bf16 stride_t=i32 stride_h=i32 out=*bf16 out_stride_t=i32 out_stride_h=i32 cos=*fp32 sin=*fp32 table_stride=i32 "
        "heads=i32 width=i32 pairs=i32",
        {"INVERSE": True, "COPY": False, "BH": 16, "D": 512, "P": 32}),
    KernelSpec("engram_gather", "kernels.rows:engram_gather_kernel",
        "table=*u8 scales=*u8 rows=*i64 count=i32 out=*bf16",
        {"HAS_SCALE": True, "WIDTH": 256, "D": 256, "BR": 16, "HARDWARE": True}),
    _gather("fp8", 0, 32),
    _gather("nvfp4", 1, 16),
    KernelSpec("rms_norm", "kernels.rows:rms_norm_kernel",
        "x=*bf16 stride=i32 weight=*bf16 out=*bf16 out_stride=i32 width=i32 eps=fp32", {"D": 4096, "REST": 1024},
        divisible=("width",)),
    KernelSpec("v4_insert", "kernels.rows:insert_v4_kernel",
        "x=*bf16 stride=i32 weight=*bf16 eps=fp32 cos=*fp32 sin=*fp32 table_stride=i32 slots=*i64 pool=*u8 stride_page=i64 "
        "rows=i32", {"NORM": True, "PAIRS": 32, "PAGE": 64, "FLOOR": 1e-4, "ROWS": 2, "ALIGN": 16, "HARDWARE": True},
        options={"num_warps": 1}),
    KernelSpec("v4_gather", "kernels.rows:gather_v4_kernel",
        "pool=*u8 slots=*i64 count=i32 pool_slots=i32 out=*bf16 stride_page=i64",
        {"PAGE": 64, "ROWS": 8, "ALIGN": 16, "HARDWARE": True}),
    KernelSpec("grouped_output", "kernels.output:grouped_output_kernel",
        "x=*bf16 x_stride_t=i32 x_stride_h=i32 cos=*fp32 sin=*fp32 table_stride=i32 weight=*bf16 out=*bf16 tokens=i32 rank=i32",
        {"HEADS": 8, "WIDTH": 512, "PAIRS": 32, "BT": 64, "BR": 64, "BK": 64},
        options={"num_warps": 4, "num_stages": 7}, divisible=("rank",), min_mma=1, quick=True),
    KernelSpec("engram_gate", "kernels.output:engram_gate_kernel",
        "streams=*bf16 projected=*bf16 stride=i32 q_weight=*bf16 k_weight=*bf16 out=*bf16 d=i32 eps=fp32 root=fp32",
        {"S": 4, "D": 4096, "REST": 1024}, divisible=("d",)),
    KernelSpec("bitmask", "kernels.sampling:bitmask_kernel",
        "logits=*fp32 stride=i32 mask_words=*i32 mask_stride=i32 rows=*i64 vocab=i32", {"WORDS": 128}),
    KernelSpec("sample_peak", "kernels.sampling:row_peak_kernel",
        "logits=*fp32 stride=i32 peaks=*fp32 places=*i32 vocab=i32", {"BLOCK": 4096}),
    KernelSpec("sample_limit", "kernels.sampling:limit_kernel",
        "weights=*fp32 temperatures=*fp32 top_k=*i64 top_p=*fp32 limits=*fp32 vocab=i32",
        {"HAS_K": True, "HAS_P": True, "BLOCK": 4096}, options={"num_warps": 16}),
    KernelSpec("sample_masses", "kernels.sampling:masses_kernel",
        "logits=*fp32 stride=i32 peaks=*fp32 temperatures=*fp32 min_p=*fp32 limits=*fp32 masses=*fp64 vocab=i32 chunks=i32 "
        "pieces=i32", {"HAS_MIN_P": True, "HAS_LIMIT": True, "C": 32, "BLOCK": 4096}),
    KernelSpec("sample_pick", "kernels.sampling:pick_kernel",
        "logits=*fp32 stride=i32 peaks=*fp32 places=*i32 temperatures=*fp32 min_p=*fp32 limits=*fp32 masses=*fp64 numbers=*fp64 "
        "out=*i64 vocab=i32 chunks=i32 pieces=i32", {"HAS_MIN_P": True, "HAS_LIMIT": True, "C": 32, "P": 512}),
    KernelSpec("verify_accept", "kernels.sampling:accept_kernel",
        "guesses=*i64 counts=*i64 target=*fp32 t_row=i64 t_place=i64 proposal=*fp32 p_row=i64 p_place=i64 seeds=*i64 "
        "anchors=*i64 weights=*fp64 accepted=*i64 K=i32", {"BLOCK_METHOD": True}, options={"num_warps": 1}),
    KernelSpec("verify_emit", "kernels.sampling:emit_kernel",
        "target=*fp32 t_row=i64 t_place=i64 proposal=*fp32 p_row=i64 p_place=i64 accepted=*i64 counts=*i64 weights=*fp64 "
        "masses=*fp64 seeds=*i64 anchors=*i64 out=*i64 vocab=i32 pieces=i32 columns=i32 K=i32",
        {"EVERY": False, "RESIDUAL": True, "SCALED": True, "P": 512}, quick=True),
    KernelSpec("markov", "kernels.llama:markov_kernel",
        "base=*fp32 base_stride=i32 previous=*i64 embed=*bf16 head=*bf16 out=*fp32 batch=i32 vocab=i32",
        {"RANK": 256, "R": 256, "BB": 64, "BV": 64}, min_mma=1),
    KernelSpec("paged_gqa_decode", "kernels.llama:paged_gqa_kernel", _GQA,
        {"GROUP": 3, "M": 16, "BQ": 5, "BLOCK": 16, "BN": 64, "WIDTH": 64, "D": 64, "QUERIES": 1, "ROWS": 4,
         "S": 1, "LEAST": 4, "INSERT": True, "AHEAD": True, "FULL": False},
        options={"num_warps": 4, "num_stages": 2}, min_mma=1, quick=True),
    KernelSpec("paged_gqa_splits", "kernels.llama:paged_gqa_kernel", _GQA,
        {"GROUP": 4, "M": 16, "BQ": 4, "BLOCK": 16, "BN": 64, "WIDTH": 128, "D": 128, "QUERIES": 4, "ROWS": 16,
          "S": 8, "LEAST": 4, "INSERT": False, "AHEAD": True, "FULL": False},
        options={"num_warps": 4, "num_stages": 2}, min_mma=1),
    KernelSpec("paged_gqa_prefill", "kernels.llama:paged_gqa_kernel", _GQA,
        {"GROUP": 4, "M": 64, "BQ": 16, "BLOCK": 16, "BN": 64, "WIDTH": 128, "D": 128, "QUERIES": 16, "ROWS": 64,
          "S": 1, "LEAST": 4, "INSERT": False, "AHEAD": True, "FULL": False},
        options={"num_warps": 4, "num_stages": 2}, min_mma=1),
    KernelSpec("paged_gqa_prefill-full", "kernels.llama:paged_gqa_kernel", _GQA,
        {"GROUP": 3, "M": 64, "BQ": 21, "BLOCK": 32, "BN": 64, "WIDTH": 64, "D": 64, "QUERIES": 21, "ROWS": 64,
         "S": 1, "LEAST": 4, "INSERT": False, "AHEAD": False, "FULL": True},
        options={"num_warps": 4, "num_stages": 2}, min_mma=1),
    KernelSpec("window_index", "kernels.v41_step:window_index_kernel",
        "positions=*i64 owners=*i32 floors=*i32 table=*i32 table_stride=i32 own=*i64 index=*i32 window=i32",
        {"BLOCK": 16, "W": 128}, options={"num_warps": 1}),
    KernelSpec("entry_slots", "kernels.v41_step:entry_slots_kernel",
        "positions=*i64 owners=*i32 write_floors=*i32 table=*i32 table_stride=i32 slots=*i64 visible=*i32 tokens=i32",
        {"BLOCK": 16, "RATIO": 2, "ENTRIES": 8, "BT": 128}),
    KernelSpec("selected_slots", "kernels.v41_step:selected_slots_kernel",
        "chosen=*i32 owners=*i32 table=*i32 table_stride=i32 K=i32", {"BLOCK": 16, "RATIO": 2, "ENTRIES": 8, "KB": 512},
        options={"num_warps": 2}),
    KernelSpec("pool_groups", "kernels.v41_step:pool_groups_kernel",
        "rows=*fp32 row_stride=i32 positions=*i64 owners=*i32 firsts=*i32 slots=*i64 ring=*fp32 ring_stride_block=i32 "
        "ring_stride_row=i32 ring_blocks=*i32 out=*fp32 width=i32 ring_rows=i32", {"RATIO": 2, "D": 512}, quick=True),
    KernelSpec("keep_rows", "kernels.v41_step:keep_rows_kernel",
        "rows=*fp32 row_stride=i32 positions=*i64 owners=*i32 ends=*i32 ring=*fp32 ring_stride_block=i32 ring_stride_row=i32 "
        "ring_blocks=*i32 width=i32 ring_rows=i32", {"D": 1024}),
    KernelSpec("clamped_swiglu_rows", "kernels.v41_step:clamped_swiglu_rows_kernel",
        "gate_up=*bf16 stride=i32 out=*bf16 width=i32 limit=fp32", {"BLOCK": 1024}),
    KernelSpec("rotation", "kernels.v41_step:rotation_kernel",
        "positions=*i64 frequencies=*fp32 cos=*fp32 sin=*fp32 pairs=i32 shift=i32", {"P": 32}, options={"num_warps": 1},
        max_stack=64),
    KernelSpec("step_inputs", "kernels.v41_step:step_inputs_kernel",
        "packed=*i32 flat=*i32 layout=*i32 header=*i32 tables=*i32 token_ids=*i64 positions=*i64 rows=i32 scratch=i32",
        {"GROUPS": 3, "BLOCK": 128}, options={"num_warps": 1}),
    KernelSpec("cache_slots", "kernels.llama_rows:cache_slots_kernel",
        "query_starts=*i32 seq_lens=*i32 write_floors=*i32 table=*i32 table_stride=i32 slots=*i64",
        {"BLOCK": 32}, options={"num_warps": 1}),
    KernelSpec("cache_slots-ragged", "kernels.ragged:ragged_slots_kernel",
        "query_starts=*i32 seq_lens=*i32 write_floors=*i32 table=*i32 table_stride=i32 slots=*i64 rows=i32 tokens=i32 "
        "steps=i32", {"BLOCK": 32, "BT": 128}),
    KernelSpec("cut_rows", "kernels.ragged:cut_rows_kernel",
        "query_starts=*i32 seq_lens=*i32 starts=*i32 lengths=*i32 table_rows=*i32 first=i32 rows=i32 length=i32 pieces=i32 "
        "steps=i32", {"BT": 128}),
    KernelSpec("ragged_inputs", "kernels.ragged:ragged_inputs_kernel",
        "query_starts=*i32 seq_lens=*i32 slots=*i32 flat=*i32 capacity=i32 scratch=i32 widths=*i32 packed=*i32 layout=*i32 "
        "tables=*i32 token_ids=*i64 positions=*i64 rows=i32 tokens=i32 steps=i32", {"GROUPS": 1, "BLOCK": 128}),
    KernelSpec("llama_norm", "kernels.llama_rows:llama_norm_kernel",
        "x=*bf16 stride=i32 weight=*bf16 out=*bf16 out_stride=i32 rows=i32 width=i32 eps=fp32", {"D": 1024, "BR": 4},
        divisible=("width",)),
    KernelSpec("rope_insert", "kernels.llama_rows:rope_insert_kernel",
        "qkv=*bf16 stride=i32 rope=*fp32 positions=*i64 slots=*i64 keys=*bf16 values=*bf16 k_stride_b=i64 k_stride_r=i64 "
        "k_stride_h=i64 v_stride_b=i64 v_stride_r=i64 v_stride_h=i64 q_norm=*bf16 k_norm=*bf16 eps=fp32",
        {"HEADS": 9, "KV_HEADS": 3, "HALF": 32, "PAIRS": 32, "BLOCK": 32, "HAS_NORM": True, "BH": 16},
        options={"num_warps": 2}, quick=True),
    KernelSpec("silu_mul", "kernels.llama_rows:silu_mul_kernel",
        "gate_up=*bf16 stride=i32 out=*bf16 out_stride=i32 width=i32", {"BLOCK": 1024}, divisible=("width",)),
    _dense("qkv", 576, 960, "norm", rows=64, outputs=64),
    _dense("o", 576, 576, "add", rows=128, outputs=64),
    _dense("gate_up", 576, 1536, "swiglu", rows=128, outputs=128, warps=8, stages=3, quick=True),
    _dense("down_few", 1536, 576, "add", rows=16, outputs=32, inputs=128),
    KernelSpec("argmax", "kernels.llama_rows:argmax_kernel",
        "logits=*fp32 stride=i32 out=*i64 flat=*i32 where=*i32 vocab=i32", {"HAS_TARGET": True, "BLOCK": 8192},
        options={"num_warps": 16}),
)  # fmt: skip


def main(names: list[str]) -> int:
    """Compile the named cases, or all; returns 0, 1 where one does not compile, 2 where a name is unknown."""
    known = [spec.name for spec in SPECS]
    if unknown := [name for name in names if name not in known]:
        sys.stderr.write(f"no kernel {', '.join(map(repr, unknown))}; there are {', '.join(known)}\n")
        return 2
    failures = 0
    for spec in SPECS:
        if names and spec.name not in names:
            continue
        for arch in spec.archs:
            try:
                report = spec.compile(arch)
            except Exception as failure:
                failures += 1
                sys.stdout.write(f"FAILED {spec.name} sm_{arch}: {type(failure).__name__}: {str(failure)[:400]}\n")
                continue
            sys.stdout.write(
                f"{spec.name:34s} sm_{arch:<4d} {report.registers:4d} regs {report.stack_bytes:5d} B stack "
                f"{report.shared_bytes:7d} B shared {report.tensor_memory:4d} tmem {report.mma:4d} mma: compiles"
                f"{'' if arch == 90 else ', not run'}\n"
            )
            sys.stdout.flush()
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
