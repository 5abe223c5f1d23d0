"""MXFP4 experts (384 of 5120 x 2304, top 6) and MXFP8 linear layers at V4.1's shapes."""

from __future__ import annotations

import torch
from deepinfer_kernels_cuda import experts, weights
from deepinfer_kernels_cuda.reference import experts as reference
from gpu_bench import Recorder, record_case, relative_error

HIDDEN, INTER, TOP_K = 5120, 2304, 6


def make_experts(count: int) -> tuple[experts.PackedExperts, experts.PackedExperts]:
    """Random codes and scales: (natural of the first 8 experts, packed all)."""

    def one(rows: int, columns: int) -> weights.MxWeights:
        codes = torch.randint(0, 256, (count, rows, columns // 2), dtype=torch.uint8, device="cuda")
        scales = torch.randint(117, 121, (count, rows, columns // 32), dtype=torch.uint8, device="cuda")
        return weights.mx_weights(codes, scales, fp4=True)

    natural = experts.PackedExperts(one(2 * INTER, HIDDEN), one(HIDDEN, INTER))
    packed = experts.PackedExperts(weights.pack_sm90(natural.gate_up, swiglu=True), weights.pack_sm90(natural.down))
    return natural, packed


def route(tokens: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Uniform routing: distinct experts a token."""
    ids = torch.rand(tokens, count, device="cuda").topk(TOP_K, -1).indices
    return ids, torch.rand(tokens, TOP_K, device="cuda") * 0.5


def expert_bytes() -> int:
    """Bytes of one expert's codes and scales."""
    return 3 * INTER * HIDDEN // 2 + 3 * INTER * HIDDEN // 32


def run_experts(
    recorder: Recorder, count: int, tokens: int, configs: list[tuple[int, int, int, int] | None], made
) -> None:
    """One routing, several (token tile, weight rows, stages, warps) configurations; None is the package's choice."""
    natural, packed = made
    ids, gates = route(tokens, count)
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    active = ids.unique().numel()
    nbytes = active * expert_bytes() + tokens * HIDDEN * 4 + tokens * TOP_K * (INTER * 2 + HIDDEN) * 2
    flops = tokens * TOP_K * 3 * INTER * HIDDEN * 2
    chosen, tile = experts.gemm_config, experts.token_tile
    for config in configs:
        if config is not None:
            experts.token_tile = lambda _tokens, bt=config[0]: bt
            experts.gemm_config = lambda _tile, fp4, c=config: c[1:]  # noqa: ARG005
        try:
            out = experts.moe_experts(x, ids, gates, packed, limit=10.0)
            few = slice(0, 6)
            want = reference.moe_experts(
                x[few], ids[few], gates[few], natural.gate_up, natural.down, limit=10.0, dtype=torch.float32
            )
            error = relative_error(out[few], want)
            recorder.record(
                "moe_experts",
                f"t={tokens} {active}/{count} experts",
                f"sm90 {config or 'default'}",
                lambda: experts.moe_experts(x, ids, gates, packed, limit=10.0),
                nbytes=nbytes,
                flops=flops,
                error=error,
            )
        except Exception as failure:
            print(f"moe t={tokens} {config} FAILED {type(failure).__name__}: {str(failure)[:300]}", flush=True)
        finally:
            experts.gemm_config, experts.token_tile = chosen, tile
    if tokens * TOP_K >= 64 * count:
        run_decode_once(recorder, count, tokens, made, (x, ids, gates), nbytes, flops)


def run_decode_once(recorder: Recorder, count: int, tokens: int, made, inputs, nbytes: float, flops: float) -> None:
    """The kernel that decodes weights once for many tokens, checked against the default one on every token."""
    x, ids, gates = inputs
    call = lambda kernel: experts.moe_experts(x, ids, gates, made[1], limit=10.0, kernel=kernel)  # noqa: E731
    recorder.record(
        "moe_experts",
        f"t={tokens} {count} experts",
        "sm90 decode_once",
        lambda: call("decode_once"),
        nbytes=nbytes,
        flops=flops,
        error=relative_error(call("decode_once"), call(None)),
    )


def run_linear(recorder: Recorder) -> None:
    """Dense MXFP8 layers with 32x32 scales."""
    for name, rows, columns in (
        ("wq_a+wkv", 1792, 5120),
        ("wq_b", 32768, 1280),
        ("wo_b", 5120, 8192),
        ("shared up", 4608, 5120),
    ):
        codes = torch.randn(rows, columns, device="cuda").to(torch.float8_e4m3fn)
        scales = torch.randint(117, 121, (rows // 32, columns // 32), dtype=torch.uint8, device="cuda")
        natural = weights.mx_weights(codes, scales, fp4=False)
        packed = weights.pack_sm90(natural)
        dense = experts.dequantize(natural)
        for tokens in (8, 64, 1024):
            x = torch.randn(tokens, columns, device="cuda").bfloat16()
            out = experts.mx_linear(x, packed)
            error = relative_error(out, reference.mx_linear(x, natural, torch.float32))
            recorder.record(
                "mx_linear",
                f"{name} t={tokens} {rows}x{columns}",
                "sm90",
                lambda x=x, packed=packed: experts.mx_linear(x, packed),
                nbytes=rows * columns * 33 / 32 + tokens * (rows + columns) * 2,
                flops=2 * tokens * rows * columns,
                error=error,
            )
            recorder.record(
                "linear bf16 (cuBLAS)",
                f"{name} t={tokens} {rows}x{columns}",
                "torch",
                lambda x=x, dense=dense: torch.nn.functional.linear(x, dense),
                nbytes=rows * columns * 2 + tokens * (rows + columns) * 2,
                flops=2 * tokens * rows * columns,
            )


def measure(recorder: Recorder, sweep: bool = False) -> None:
    """Decode and prefill of the whole layer, then linear layers."""
    made = make_experts(64)
    run_experts(recorder, 64, 4096, [None], made)
    del made
    made = make_experts(384)
    for tokens in (1, 8, 64, 256, 1024, 4096):
        small: list[tuple[int, int, int, int] | None] = [(16, 64, 4, 4), (16, 64, 5, 4), (16, 128, 4, 8)]
        large: list[tuple[int, int, int, int] | None] = [(64, 128, 3, 4), (64, 256, 3, 8), (128, 128, 2, 8)]
        configs = ([*(small if tokens <= 256 else large)] if sweep and tokens >= 64 else []) + [None]
        run_experts(recorder, 384, tokens, configs, made)
    del made
    torch.cuda.empty_cache()
    run_linear(recorder)


def run(argv: list[str]) -> int:
    return record_case("experts", measure, argv, sweep="time further tilings too")


if __name__ == "__main__":
    import sys

    raise SystemExit(run(sys.argv[1:]))
