"""The expert router (V4.1 section 2.6)."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from .capability import device_arch
from .checks import require, require_dims, require_dtype, require_inner, require_same_device
from .libraries import product
from .native import NativeKernel, native_reason
from .overlap import overlap
from .tensormaps import fits_map, tensor_map

#: Tokens from which the library's matrix product is faster than the split one (H200: 21 us of 16 GFLOP at 4096).
_LIBRARY_TOKENS = 512


#: Selection on sm_90 of whole logits by experts of a lane: a warp a token, four a block, up to 32 experts chosen.
@functools.lru_cache(maxsize=16)
def _select_kernel(items: int, together: int, pieces: int) -> NativeKernel:
    return NativeKernel(
        "router.cu", "router_select", "PPPPiiiifi", threads=128,
        defines=(f"ITEMS={items}", f"TOGETHER={together}", f"PIECES={pieces}"),
    )  # fmt: skip


_PIECES = 0
_SELECT_WARPS, _SELECT_MOST, _SELECT_EXPERTS = 4, 32, 512
#: Up to so many tokens the warps of a block sum the spans of one token together.
_TOGETHER_TOKENS = 256


#: The product on sm_90 for many tokens: experts of a block, its steps of columns, blocks of a cluster.
_BLOCK_EXPERTS, _STEP, _CLUSTER, _MULTIPROCESSORS = 192, 64, 2, 132


@functools.lru_cache(maxsize=32)
def _product_kernel(tokens: int, experts: int, cluster: int, stages: int, early: int, fuse: int = 0) -> NativeKernel:
    shared = stages * (tokens + experts) * 128 + 1024
    return NativeKernel(
        "router_product.cu", "router_product", "128s128sPiiii" + "PPPifiP" * bool(fuse), threads=288, shared=shared,
        defines=(f"TOKENS={tokens}", f"EXPERTS={experts}", f"CLUSTER={cluster}", f"STAGES={stages}", f"EARLY={early}",
                 f"FUSE={2 if fuse == 9 else int(fuse > 0)}", f"PAIR={1 if fuse == 9 else fuse or 2}", f"SHARED={shared}"),
    )  # fmt: skip


@dataclass(frozen=True)
class _Split:
    """How the product is cut: tokens, experts and columns of a tile, columns of a block."""

    tokens: int
    experts: int
    columns: int
    span: int
    warps: int
    stages: int


def _split(t: int, experts: int, d: int, wide: bool) -> _Split:
    """Cut so that about one block runs on each multiprocessor, with few steps in a block."""
    bt, be, bk = (16, 64, 32) if wide else (16, 64, 128) if t <= 16 else (64, 32, 128) if t <= 64 else (64, 64, 128)
    tiles = -(-t // bt) * -(-experts // be)
    spans = max(1, min(-(-d // bk), 10, round(132 / tiles)))
    return _Split(bt, be, bk, -(-d // (spans * bk)) * bk, 4, 3)


def router(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, k: int, normalise: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select k experts by sqrt(softplus(x . w)) + bias; ties go to the lowest expert (V4.1 section 2.6).

    Args:
        x: [t, d], last dimension contiguous.
        weight: [experts, d] in x's dtype, contiguous; at most 2048 experts.
        bias: float32 [experts], of the selection only.
        k: Experts of a token.
        normalise: Divide the weights by their sum.
        scale: `routed_scaling_factor`.

    Returns:
        ids int64 [t, k], ascending, and weights float32 [t, k].
    """
    require_dims("x", x, 2)
    require_inner("x", x)
    t, d = x.shape
    experts = weight.shape[0]
    require(weight.shape[1] == d and weight.is_contiguous(), f"weight {tuple(weight.shape)} does not fit x [{t}, {d}]")
    require_dtype("weight", weight, x.dtype)
    require_dtype("bias", bias, torch.float32)
    require(1 <= k <= experts <= 2048, f"k {k} of {experts} experts; allowed: k <= experts <= 2048")
    require_same_device(x, weight, bias)
    ids = torch.empty(t, k, dtype=torch.int64, device=x.device)
    gates = torch.empty(t, k, dtype=torch.float32, device=x.device)
    if t:
        _select(_parts(x, weight), bias, ids, gates, normalise, scale)
    return ids, gates


def _parts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Partial logits float32 [spans, t, experts]."""
    # cuBLAS has no better kernel for few tokens, and none that keeps float32 exact.
    if not (x.is_cuda and x.dtype == torch.bfloat16 and x.shape[0] >= _LIBRARY_TOKENS):
        return _logits(x, weight)
    fits = weight.shape[0] % _BLOCK_EXPERTS == 0 and fits_map(x) and fits_map(weight)
    if fits and device_arch(x.device) == 90 and native_reason() is None:
        return _logits_sm90(x, weight)
    return product(x, weight)[None]


@functools.lru_cache(maxsize=1024)
def _spans(tiles: int, steps: int) -> int:
    """Into how many spans of columns the product of so many tiles is cut: the least time, in steps of a block.

    A block takes some 8 steps to begin and to end; a part of the logits takes one step of 132 blocks to write and read.
    """

    def time(spans: int) -> float:
        return -(-tiles * spans // _MULTIPROCESSORS) * (-(-steps // spans) + 8) + tiles * spans / 64

    return min((spans for spans in range(1, 17) if -(-steps // -(-steps // spans)) == spans), key=time)


def _logits_sm90(
    x: torch.Tensor, weight: torch.Tensor, tokens: int = 128, wide: int = 192, cluster: int = _CLUSTER,
    stages: int = 5, early: int = 0, spans: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """The same in CUDA C++, for many tokens."""
    (t, d), experts = x.shape, weight.shape[0]
    tiles, steps = -(-t // (tokens * cluster)) * cluster, -(-d // _STEP)
    across = experts // wide
    span = -(-steps // (spans or _spans(tiles * across, steps)))
    part = torch.empty(-(-steps // span), t, experts, dtype=torch.float32, device=x.device)
    _product_kernel(tokens, wide, cluster, stages, early)(
        (tiles, across, part.shape[0]), tensor_map(x, tokens), tensor_map(weight, wide // cluster),
        part.data_ptr(), t, experts, steps, span, device=x.device, cluster=cluster,
    )  # fmt: skip
    return part


@functools.lru_cache(maxsize=64)
def _counters(device: torch.device, stream: int) -> torch.Tensor:  # noqa: ARG001  (the cache's key)
    return torch.zeros(2 * _MULTIPROCESSORS, dtype=torch.int32, device=device)


@functools.lru_cache(maxsize=64)
def _mail(device: torch.device, stream: int) -> torch.Tensor:  # noqa: ARG001  (the cache's key)
    return torch.full((132 * 64 * 96,), -8531, dtype=torch.int32, device=device).view(torch.float32)


def _fused(x, weight, bias, ids, gates, normalise, scale, tokens, wide, cluster, stages, early, spans, pair=2) -> None:
    (t, d), experts = x.shape, weight.shape[0]
    tiles, steps = -(-t // (tokens * cluster)) * cluster, -(-d // _STEP)
    across = experts // wide
    span = -(-steps // spans)
    part = torch.empty(-(-steps // span), t, experts, dtype=torch.float32, device=x.device)
    assert tiles * across * part.shape[0] <= _MULTIPROCESSORS
    if pair == 9:
        part = _mail(x.device, torch.cuda.current_stream(x.device).cuda_stream)[: part.numel()].view(part.shape)
    counters = _counters(x.device, torch.cuda.current_stream(x.device).cuda_stream)
    _product_kernel(tokens, wide, cluster, stages, early, pair)(
        (tiles, across, part.shape[0]), tensor_map(x, tokens), tensor_map(weight, wide // cluster),
        part.data_ptr(), t, experts, steps, span, bias.data_ptr(), ids.data_ptr(), gates.data_ptr(), ids.shape[1], scale,
        int(normalise), counters.data_ptr(), device=x.device, cluster=cluster,
    )  # fmt: skip


def _logits(x: torch.Tensor, weight: torch.Tensor, cut: _Split | None = None) -> torch.Tensor:
    """Partial logits float32 [spans, t, experts]."""
    from .kernels.router import router_logits_kernel

    (t, d), experts = x.shape, weight.shape[0]
    cut = cut or _split(t, experts, d, x.dtype == torch.float32)
    spans = -(-d // cut.span)
    part = torch.empty(spans, t, experts, dtype=torch.float32, device=x.device)
    router_logits_kernel[(-(-t // cut.tokens), -(-experts // cut.experts), spans)](
        x, x.stride(0), weight, part, t, experts, d, BT=cut.tokens, BE=cut.experts, BK=cut.columns, SPAN=cut.span,
        num_warps=cut.warps, num_stages=cut.stages, **overlap(x.device),
    )  # fmt: skip
    return part


def _select(part, bias, ids, gates, normalise: bool, scale: float) -> None:
    fits = part.shape[2] <= _SELECT_EXPERTS and ids.shape[1] <= _SELECT_MOST and bias.is_contiguous()
    native = fits and device_arch(part.device) == 90 and native_reason() is None
    (_select_sm90 if native else _select_portable)(part, bias, ids, gates, normalise, scale)


def _lane_experts(experts: int) -> int:
    return -(-experts // 128) * 4


def _select_sm90(part, bias, ids, gates, normalise: bool, scale: float) -> None:
    (spans, t, experts), k = part.shape, ids.shape[1]
    together = _SELECT_WARPS if spans > 1 and t <= _TOGETHER_TOKENS else 1
    _select_kernel(_lane_experts(experts), together, _PIECES)(
        (-(-t * together // _SELECT_WARPS), 1, 1),
        part.data_ptr(), bias.data_ptr(), ids.data_ptr(), gates.data_ptr(), t, experts, spans, k, scale, int(normalise),
        device=part.device,
    )  # fmt: skip


def _select_portable(part, bias, ids, gates, normalise: bool, scale: float) -> None:
    from .kernels.router import router_select_kernel

    spans, t, experts = part.shape
    width = max(16, 1 << (experts - 1).bit_length())
    router_select_kernel[(t,)](
        part, bias, ids, gates, t, experts, spans, scale, NORMALISE=normalise, K=ids.shape[1], E=width,
        W=max(2, 1 << (ids.shape[1] - 1).bit_length()), SPANS=1 << (spans - 1).bit_length(),
        num_warps=1 if spans == 1 else 2, **overlap(part.device),
    )  # fmt: skip
