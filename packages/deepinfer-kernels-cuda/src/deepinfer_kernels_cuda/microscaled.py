"""Microscaled linear layers."""

from __future__ import annotations

import torch

from .capability import device_arch
from .checks import require, require_dims, require_dtype, require_inner, require_same_device
from .overlap import overlap, overlaps
from .providers import MeasuredChoice
from .weights import MxWeights, pack_sm90


def token_tile(tokens: int) -> int:
    """Tokens a tile for an expected load of `tokens` rows a matrix."""
    return 16 if tokens <= 16 else 32 if tokens <= 40 else 64


def gemm_config(token_tile: int, *, fp4: bool) -> tuple[int, int, int]:
    """(weight rows a tile, stages, warps) of the Hopper kernel, as measured on an H200."""
    if token_tile <= 16:
        return 64, 5, 4
    return (128 if fp4 else 64), 3, 4


def mx_linear(
    x: torch.Tensor, weights: MxWeights, *, out: torch.Tensor | None = None, swiglu_limit: float | None = None
) -> torch.Tensor:
    """x times one microscaled matrix, transposed: [t, K] to [t, N].

    Args:
        x: bfloat16 (float32: portable kernel) [t, K].
        weights: `mx_weights(...)`, or `pack_sm90` of it.
        out: Where to write.
        swiglu_limit: Fuse the clamped SwiGLU: N gate and up rows give N / 2 channels (weights packed with `swiglu`).

    Returns:
        [t, N] or [t, N / 2] in x's dtype.
    """
    require_dims("x", x, 2)
    require_inner("x", x)
    require(x.shape[1] == weights.columns, f"x has {x.shape[1]} channels; weights take {weights.columns}")
    require((swiglu_limit is not None) <= (weights.swiglu or not weights.packed), "weights are not packed for swiglu")
    require_same_device(x, weights.codes)
    if weights.packed:
        require_dtype("x", x, torch.bfloat16)
    tokens, rows = x.shape[0], weights.rows
    width = rows // 2 if swiglu_limit is not None else rows
    out = torch.empty(tokens, width, dtype=x.dtype, device=x.device) if out is None else out
    if tokens == 0:
        return out
    if weights.packed:
        _linear_sm90(x, weights, out, swiglu_limit)
    else:
        _linear_portable(x, weights, out, swiglu_limit)
    return out


def _linear_sm90(x, weights, out, swiglu_limit) -> None:
    from .kernels.mx_gemm import sum_splits_kernel
    from .sm90.mx_gemm import sm90_mx_gemm_kernel

    tokens = x.shape[0]
    n_blocks, k_blocks = weights.codes.shape[1], weights.codes.shape[2]
    bt = token_tile(tokens)
    bn, stages, warps = gemm_config(bt, fp4=weights.fp4)
    tiles = -(-n_blocks * 64 // bn) * -(-tokens // bt)
    splits = 1
    if swiglu_limit is None and tiles < 264:
        splits = max(1, min(k_blocks // 4, 16, round(396 / tiles)))
    target = out
    if splits > 1:
        target = torch.empty(splits, tokens, weights.rows, dtype=torch.float32, device=x.device)
    sm90_mx_gemm_kernel[(-(-n_blocks * 64 // bn), -(-tokens // bt), splits)](
        x, x.stride(0), weights.codes, weights.scales, target, weights.rows if splits > 1 else out.stride(0),
        weights.codes, weights.codes, weights.scales,
        weights.rows, weights.columns, n_blocks, k_blocks, tokens, float(swiglu_limit or 0.0),
        FP4=weights.fp4, GROUPED=False, GATHER=False, SCATTER=False, SWIGLU=swiglu_limit is not None, SPLIT_K=splits,
        BN=bn, BT=bt, STAGES=stages, num_warps=warps, launch_pdl=overlaps(x.device),
    )  # fmt: skip
    if splits > 1:
        block = 512
        sum_splits_kernel[(tokens, -(-weights.rows // block))](
            target,
            out,
            out.stride(0),
            tokens,
            weights.rows,
            SPLITS=splits,
            BLOCK=block,
            num_warps=4,
            **overlap(x.device),
        )


def _linear_portable(x, weights, out, swiglu_limit) -> None:
    from .kernels.mx_gemm import clamped_swiglu_kernel, mx_gemm_kernel

    tokens = x.shape[0]
    both = out
    if swiglu_limit is not None:
        both = torch.empty(tokens, weights.rows, dtype=x.dtype, device=x.device)
    mx_gemm_kernel[(-(-weights.rows // 64), 1, -(-tokens // 16))](
        x, x.stride(0), weights.codes, weights.scales, both, both.stride(0), both, both,
        weights.rows, weights.columns, tokens, 1,
        FP4=weights.fp4, GROUPED=False, GATHER=False, SCATTER=False, BT=16, BN=64, BK=64, num_warps=4,
    )  # fmt: skip
    if swiglu_limit is not None:
        width = weights.rows // 2
        block = min(1024, 1 << (width - 1).bit_length())
        clamped_swiglu_kernel[(tokens, -(-width // block))](
            both, out, both, both, width, float(swiglu_limit), WEIGHTED=False, BLOCK=block
        )


class MxLinear:
    """One microscaled layer with a choice, measured once a token bucket: the packed kernel, or a dense bfloat16 GEMM.

    On an H200 the packed kernel wins up to some 16 tokens (half the bytes), the dense one from 64 on (no unpacking). The dense
    twin costs 2 bytes a weight on top of 1; leave it out where memory is short.

    Args:
        weights: Natural weights.
        dense: Keep a dense twin.
    """

    def __init__(self, weights: MxWeights, *, dense: bool = True) -> None:
        arch = device_arch(weights.codes.device)
        fits = arch == 90 and weights.columns % 16 == 0
        self.packed = pack_sm90(weights) if fits else weights
        self.dense = dequantize(weights) if dense else None
        self.choice = MeasuredChoice()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [t, K] bfloat16 to [t, N]."""
        if self.dense is None:
            return mx_linear(x, self.packed)
        bucket = 1 << max(x.shape[0] - 1, 0).bit_length()
        candidates = {
            "packed": lambda: mx_linear(x, self.packed),
            "dense": lambda: torch.nn.functional.linear(x, self.dense),
        }
        return candidates[self.choice.choose(bucket, candidates, x.device)]()


def dequantize(weights: MxWeights, expert: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Natural weights of one expert as a dense [N, K] tensor (for large token counts, where a dense GEMM wins)."""
    from .kernels.mx_gemm import dequantize_kernel

    require(not weights.packed, "packed weights cannot be dequantised; keep the natural ones")
    out = torch.empty(weights.rows, weights.columns, dtype=dtype, device=weights.codes.device)
    dequantize_kernel[(-(-weights.rows // 32), -(-weights.columns // 128))](
        weights.codes[expert], weights.scales[expert], out, weights.rows, weights.columns,
        FP4=weights.fp4, BN=32, BK=128, num_warps=4,
    )  # fmt: skip
    return out
