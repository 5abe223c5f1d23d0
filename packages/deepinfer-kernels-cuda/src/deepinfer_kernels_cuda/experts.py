"""Routed experts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .capability import device_arch, sm_count
from .checks import require, require_dims, require_dtype, require_inner, require_same_device
from .microscaled import gemm_config, token_tile
from .native import NativeKernel, native_reason
from .overlap import overlap, overlaps
from .weights import MxWeights, mx_weights, pack_sm90


@dataclass(frozen=True)
class _Walk:
    """A build of `cuda/experts.cu`: tiles of 64 weight rows of a consumer group, and most tokens of a tile."""

    tiles: int
    tokens: int

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block: three stages, two buffers of results a group, and what aligns them."""
        stage = 256 * self.tokens + 2 * self.tiles * (4096 + 256) + 32
        return 3 * stage + 2 * self.tokens * (2 * 144 + 4) + 1024

    @property
    def defines(self) -> tuple[str, ...]:
        """Macros of the source."""
        return (f"TILES={self.tiles}", f"TOKENS={self.tokens}")


@functools.lru_cache
def _native(walk: _Walk, entry: str) -> NativeKernel:
    if entry == "gather_rows":
        return NativeKernel("experts.cu", entry, "PqPiPPPPqPPPiiii", threads=256, defines=walk.defines)
    return NativeKernel("experts.cu", entry, "PqPPPqPPPiiiiif", threads=384, shared=walk.shared, defines=walk.defines)


#: Few tokens an expert, and many.
NARROW, WIDE = _Walk(4, 80), _Walk(2, 128)
#: Pairs an expert from which weights are decoded once for many tokens.
DECODE_ONCE_PAIRS: int = 64
#: Over how many pairs an expert fewer weight rows a block and more tokens are taken.
_WIDE_PAIRS = 72
#: Pairs from which they are grouped in larger blocks.
_MANY_PAIRS = 16384


@dataclass(frozen=True)
class PackedExperts:
    """One layer's routed experts, ready for `moe_experts`: gate_up [E, 2m, d] and down [E, d, m]."""

    gate_up: MxWeights
    down: MxWeights

    @property
    def count(self) -> int:
        """Number of experts."""
        return self.gate_up.experts

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.gate_up.nbytes + self.down.nbytes


def prepare_experts(experts: Any, *, dtype: torch.dtype = torch.bfloat16, kernel: str | None = None) -> PackedExperts:
    """Repack a layer's FP4 experts once, at load.

    Args:
        experts: Anything with `gate_up`, `down` (int8/uint8 [E, rows, columns / 2]) and `gate_up_scale`, `down_scale`
            (E8M0 [E, rows, ceil(columns / 32)]); gate rows first.
        dtype: of the activations to come: `sm90` takes bfloat16 only.
        kernel: `sm90` or `portable`; default by the device of the weights and `dtype`.

    Raises:
        ArgumentError: Dense experts, or shapes that do not belong together.
    """
    require(experts.gate_up_scale is not None, "dense experts have no scales: only FP4 experts are repacked")
    gate_up = mx_weights(experts.gate_up, experts.gate_up_scale, fp4=True)
    down = mx_weights(experts.down, experts.down_scale, fp4=True)
    require(
        gate_up.rows == 2 * down.columns and gate_up.columns == down.rows,
        f"gate_up {gate_up.rows}x{gate_up.columns} and down {down.rows}x{down.columns} do not belong together",
    )
    if kernel is None:
        fits = gate_up.columns % 16 == 0 and down.columns % 16 == 0
        hopper = device_arch(gate_up.codes.device) == 90 and dtype == torch.bfloat16
        kernel = "sm90" if hopper and fits else "portable"
    if kernel == "sm90":
        return PackedExperts(pack_sm90(gate_up, swiglu=True), pack_sm90(down))
    return PackedExperts(gate_up, down)


def moe_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: Any,
    *,
    limit: float,
    shared: torch.Tensor | Callable[[], torch.Tensor] | None = None,
    kernel: str | None = None,
) -> torch.Tensor:
    """The weighted sum of each token's experts (V4.1 section 2.6); deterministic, no token is dropped.

    Args:
        x: bfloat16 (float32: portable kernel) [t, d].
        ids: int32 or int64 [t, k] expert ids, -1 = padding.
        weights: float32 [t, k], multiplied into the activation before the down projection.
        experts: `PackedExperts`, or what `prepare_experts` takes (then the portable kernel reads it as it is).
        limit: `swiglu_limit`.
        shared: Output of the shared expert [t, d], added at the end; or what gives it, called when all else is enqueued.
        kernel: `decode_once` decodes packed weights once for up to 128 tokens (prefill; sm90); None chooses by the load of an
            expert, among the kernels that `experts` are prepared for.

    Returns:
        [t, d] in x's dtype.
    """
    require_dims("x", x, 2)
    require_inner("x", x)
    require_dims("ids", ids, 2)
    require(kernel in (None, "decode_once"), f"kernel is {kernel!r}; allowed: None, 'decode_once'")
    require(ids.shape == weights.shape, f"ids {tuple(ids.shape)} and weights {tuple(weights.shape)} differ")
    require(ids.shape[0] == x.shape[0], f"ids has {ids.shape[0]} rows; x has {x.shape[0]}")
    require_dtype("weights", weights, torch.float32)
    require_dtype("ids", ids, torch.int32, torch.int64)
    packed = experts if isinstance(experts, PackedExperts) else prepare_experts(experts, kernel="portable")
    require(x.shape[1] == packed.gate_up.columns, f"x has {x.shape[1]} channels; experts take {packed.gate_up.columns}")
    require_same_device(x, ids, weights, packed.gate_up.codes)
    if packed.gate_up.packed:
        require_dtype("x", x, torch.bfloat16)
    out = torch.empty_like(x)
    if x.shape[0] == 0:
        return out
    ids, weights = ids.contiguous(), weights.contiguous()
    order, offsets = group_pairs(ids, packed.count)
    run = _run_sm90 if packed.gate_up.packed else _run_portable
    many = ids.numel() >= DECODE_ONCE_PAIRS * packed.count and native_reason() is None
    if kernel == "decode_once" or many:
        fits = packed.gate_up.packed and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 and x.dtype == torch.bfloat16
        require(fits or kernel is None, "decode_once takes packed weights and bfloat16 rows on 16-byte boundaries")
        run = _run_decode_once if fits else run
    parts = run(x, ids, weights, packed, order, offsets, limit)
    if callable(shared):
        shared = shared()
    require_same_device(x, shared)
    _combine(parts, ids, shared, out)
    return out


def group_pairs(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort (token, expert) pairs by expert, stably: (pair order int32 [t * k], offsets int32 [experts + 1])."""
    from .kernels.mx_gemm import group_pairs_kernel

    pairs = ids.numel()
    order = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    offsets = torch.empty(experts + 1, dtype=torch.int32, device=ids.device)
    # Each pass over the pairs waits for memory once a block: many pairs want large ones.
    block = max(128, min(2048 if pairs < _MANY_PAIRS else 8192, 1 << (pairs - 1).bit_length()))
    group_pairs_kernel[(experts,)](
        ids, pairs, order, offsets, experts, BLOCK=block, num_warps=4 if block <= 2048 else 16, **overlap(ids.device)
    )
    return order, offsets


def _combine(parts: torch.Tensor, ids: torch.Tensor, shared: torch.Tensor | None, out: torch.Tensor) -> None:
    from .kernels.mx_gemm import combine_kernel

    tokens, width = out.shape
    block = min(1024, 1 << (width - 1).bit_length())
    combine_kernel[(tokens, -(-width // block))](
        parts, ids, shared if shared is not None else out, out, out.stride(0), width,
        TOP_K=ids.shape[1], HAS_SHARED=shared is not None, BLOCK=block, num_warps=4, **overlap(out.device),
    )  # fmt: skip


def _run_sm90(x, ids, weights, packed, order, offsets, limit) -> torch.Tensor:
    from .sm90.mx_gemm import sm90_mx_gemm_kernel

    top_k = ids.shape[1]
    pairs, width = ids.numel(), packed.down.columns
    per_expert = -(-pairs // packed.count)
    bt = token_tile(per_expert)
    splits = max(1, min(8, -(-per_expert // bt) * (2 if per_expert > 16 else 1)))
    hidden = torch.empty(pairs, width, dtype=x.dtype, device=x.device)
    parts = torch.empty(pairs, packed.down.rows, dtype=x.dtype, device=x.device)
    for first, mx, source, target in ((True, packed.gate_up, x, hidden), (False, packed.down, hidden, parts)):
        bn, stages, warps = gemm_config(bt, fp4=True)
        n_blocks, k_blocks = mx.codes.shape[1], mx.codes.shape[2]
        sm90_mx_gemm_kernel[(-(-n_blocks * 64 // bn), packed.count, splits)](
            source, source.stride(0), mx.codes, mx.scales, target, target.stride(0), order, offsets, weights,
            mx.rows, mx.columns, n_blocks, k_blocks, top_k, float(limit),
            FP4=True, GROUPED=True, GATHER=first, SCATTER=not first, SWIGLU=first, SPLIT_K=1,
            BN=bn, BT=bt, STAGES=stages, num_warps=warps, launch_pdl=overlaps(x.device),
        )  # fmt: skip
    return parts


def _run_decode_once(x, ids, weights, packed, order, offsets, limit) -> torch.Tensor:
    pairs, count, up, down = ids.numel(), packed.count, packed.gate_up, packed.down
    walk = WIDE if pairs > _WIDE_PAIRS * count else NARROW
    device, planes = x.device, [2 * mx.codes.shape[2] for mx in (up, down)]  # of 64 columns
    padded = -(-(pairs + 8 * count) // 8) * 8  # an expert's rows begin at a multiple of 8
    plane, tiles = 128 * padded, count + pairs // walk.tokens
    target, weight = (torch.empty(padded, dtype=dtype, device=device) for dtype in (torch.int32, torch.float32))
    plan = torch.empty(4 + 4 * tiles, dtype=torch.int32, device=device)
    rows, hidden = (torch.empty(n * plane, dtype=torch.uint8, device=device) for n in planes)
    _native(walk, "gather_rows")(
        (1 + -(-pairs // 8), 1, 1),
        x.data_ptr(), x.stride(0), ids.data_ptr(), ids.element_size(), order.data_ptr(), offsets.data_ptr(),
        weights.data_ptr(), rows.data_ptr(), plane, target.data_ptr(), weight.data_ptr(), plan.data_ptr(), count,
        ids.shape[1], up.columns, planes[0], device=device,
    )  # fmt: skip

    def multiply(entry: str, source: torch.Tensor, mx: MxWeights, out: torch.Tensor, stride: int, written: int) -> None:
        n_blocks, k_blocks = mx.codes.shape[1], mx.codes.shape[2]
        # As many blocks of weight rows as write every plane that the second product reads.
        blocks = -(-max(n_blocks, 2 * written) // (2 * walk.tiles))
        _native(walk, entry)(
            (sm_count(device), 1, 1),
            source.data_ptr(), plane, mx.codes.data_ptr(), mx.scales.data_ptr(), out.data_ptr(), stride, plan.data_ptr(),
            target.data_ptr(), weight.data_ptr(), blocks, mx.rows, n_blocks, k_blocks, written, float(limit), device=device,
        )  # fmt: skip

    multiply("experts_up", rows, up, hidden, 0, planes[1])
    del rows  # as large as what comes
    parts = torch.empty(pairs, down.rows, dtype=x.dtype, device=device)
    multiply("experts_down", hidden, down, parts, parts.stride(0), 0)
    return parts


def _run_portable(x, ids, weights, packed, order, offsets, limit) -> torch.Tensor:
    from .kernels.mx_gemm import clamped_swiglu_kernel, mx_gemm_kernel

    pairs, width = ids.numel(), packed.down.columns
    order = order.clamp(0, pairs - 1)  # entries past the last valid pair were never written
    both = torch.zeros(pairs, packed.gate_up.rows, dtype=x.dtype, device=x.device)
    hidden = torch.empty(pairs, width, dtype=x.dtype, device=x.device)
    parts = torch.empty(pairs, packed.down.rows, dtype=x.dtype, device=x.device)
    block = min(1024, 1 << (width - 1).bit_length())
    tiles = max(1, min(8, -(-pairs // packed.count) // 16))
    for first, mx, source, target in ((True, packed.gate_up, x, both), (False, packed.down, hidden, parts)):
        if not first:
            clamped_swiglu_kernel[(pairs, -(-width // block))](
                both, hidden, order, weights, width, float(limit), WEIGHTED=True, BLOCK=block
            )
        mx_gemm_kernel[(-(-mx.rows // 64), packed.count, tiles)](
            source, source.stride(0), mx.codes, mx.scales, target, target.stride(0), order, offsets,
            mx.rows, mx.columns, pairs, ids.shape[1],
            FP4=mx.fp4, GROUPED=True, GATHER=first, SCATTER=not first, BT=16, BN=64, BK=64, num_warps=4,
        )  # fmt: skip
    return parts
