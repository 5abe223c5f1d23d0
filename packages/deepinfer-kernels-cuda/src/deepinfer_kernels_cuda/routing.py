"""The expert router (V4.1 section 2.6)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .capability import device_arch
from .checks import require, require_dims, require_dtype, require_inner, require_same_device
from .libraries import product
from .native import NativeKernel, native_reason
from .overlap import overlap

#: Tokens from which the library's matrix product is faster than the split one (H200: 21 us of 16 GFLOP at 4096).
_LIBRARY_TOKENS = 512
#: Selection on sm_90 of whole logits by experts of a lane: a warp a token, four a block, up to 32 experts chosen.
_SELECT = {
    items: NativeKernel("router.cu", "router_select", "PPPPiiifi", threads=128, defines=(f"ITEMS={items}",))
    for items in (4, 8, 12, 16)
}
_SELECT_TOKENS, _SELECT_MOST = 4, 32


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
        # cuBLAS has no better kernel for few tokens, and none that keeps float32 exact.
        library = x.is_cuda and x.dtype == torch.bfloat16 and t >= _LIBRARY_TOKENS
        part = product(x, weight)[None] if library else _logits(x, weight)
        _select(part, bias, ids, gates, normalise, scale)
    return ids, gates


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
    fits = (
        part.shape[0] == 1 and _lane_experts(part) in _SELECT and ids.shape[1] <= _SELECT_MOST and bias.is_contiguous()
    )
    native = fits and device_arch(part.device) == 90 and native_reason() is None
    (_select_sm90 if native else _select_portable)(part, bias, ids, gates, normalise, scale)


def _lane_experts(part: torch.Tensor) -> int:
    return -(-part.shape[2] // 128) * 4


def _select_sm90(part, bias, ids, gates, normalise: bool, scale: float) -> None:
    (_, t, experts), k = part.shape, ids.shape[1]
    _SELECT[_lane_experts(part)](
        (-(-t // _SELECT_TOKENS), 1, 1),
        part.data_ptr(), bias.data_ptr(), ids.data_ptr(), gates.data_ptr(), t, experts, k, scale, int(normalise),
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
