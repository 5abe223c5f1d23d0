"""The expert router (V4.1 section 2.6)."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from .capability import device_arch
from .checks import require, require_dims, require_dtype, require_inner, require_same_device
from .libraries import product
from .mailboxes import mailbox
from .native import NativeKernel, native_reason
from .overlap import overlap
from .tensormaps import fits_map, tensor_map

#: Tokens from which the library's matrix product is faster than the split one (H200: 21 us of 16 GFLOP at 4096).
_LIBRARY_TOKENS = 512
#: In how many parts along the hidden size the library multiplies, up to so many logits (H200, products and selection in us: 512
#: tokens of 384 experts 9.1 in four parts and 12.0 in one, 1024 12.0 in two and 14.4, 2048 17.7 and 20.1, 3072 24.3 and 24.3).
_LIBRARY_PARTS = ((640 * 384, 4), (2560 * 384, 2))
#: Parts of a product's sum that the selection takes: a kernel is built for each number.
PARTS = (1, 2, 4, 8, 10)
#: A part has so many columns at least.
_PART_COLUMNS = 1024
#: Selection on sm_90, a warp a token and four a block, up to so many experts of which so many are chosen.
_SELECT_WARPS, _SELECT_EXPERTS, _SELECT_MOST = 4, 512, 32
#: The product in CUDA C++: V4.1's experts, tokens and experts of a block, columns of a step, most spans, blocks at once.
_EXPERTS, _BLOCK_TOKENS, _BLOCK_EXPERTS, _STEP, _SPANS, _MULTIPROCESSORS = 384, 64, 96, 64, 16, 132
#: It selects too up to so many tokens, and leaves the selection to the next kernel up to so many (H200, at 128: 6.6 us against
#: 7.5; at 256: 9.9 against 8.0).
_ONE_LAUNCH, _TWO_LAUNCHES = 128, 256
_PRODUCT_SHARED = 5 * (_BLOCK_TOKENS + _BLOCK_EXPERTS) * 128 + 1024
_EMPTY = -8531  # 0xffffdead, what the kernel takes for no part of a logit


@functools.lru_cache(maxsize=32)
def _select_kernel(items: int, parts: int, top: int, whole: bool) -> NativeKernel:
    defines = (f"ITEMS={items}", f"PARTS={parts}", f"TOP={top}", f"WHOLE={int(whole)}")
    return NativeKernel("router.cu", "router_select", "PPPPiifi", threads=32 * _SELECT_WARPS, defines=defines)


@functools.lru_cache(maxsize=8)
def _product_kernel(top: int) -> NativeKernel:
    """With a selection of `top` experts, or the product alone if 0."""
    defines = (f"SELECTS={int(top > 0)}", f"SHARED={_PRODUCT_SHARED}", f"TOP={max(top, 1)}")
    arguments = "128s128sPiiii" + ("PPPfi" if top else "")
    return NativeKernel(
        "router_product.cu", "router_product", arguments, threads=288, shared=_PRODUCT_SHARED, defines=defines
    )


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
    tiles, steps = -(-t // bt) * -(-experts // be), -(-d // bk)
    return _Split(bt, be, bk, -(-steps // _parts(steps, round(_MULTIPROCESSORS / tiles))) * bk, 4, 3)


def _parts(steps: int, most: int) -> int:
    """In how many parts of `PARTS` to cut the steps: as many as allowed, and none is empty."""
    return max(parts for parts in PARTS if parts <= max(most, 1) and -(-steps // -(-steps // parts)) == parts)


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
        _route(x, weight, bias, ids, gates, normalise, scale)
    return ids, gates


def _route(x, weight, bias, ids, gates, normalise: bool, scale: float) -> None:
    t, k, native = x.shape[0], ids.shape[1], _takes_maps(x, weight)
    selects = native and t <= _ONE_LAUNCH and k <= _SELECT_MOST and _in_sixteens(bias)
    if selects and _blocks_at_once(x.device, k) >= _MULTIPROCESSORS:
        _route_sm90(x, weight, bias, ids, gates, normalise, scale)
        return
    # cuBLAS has no better kernel for few tokens, and none that keeps float32 exact.
    parts = _library_parts(t, *weight.shape)
    library = x.is_cuda and x.dtype == torch.bfloat16 and t > _TWO_LAUNCHES and (parts > 1 or t >= _LIBRARY_TOKENS)
    if library:
        part = _logits_library(x, weight, parts)
    else:
        part = _logits_sm90(x, weight) if native and t <= _TWO_LAUNCHES else _logits(x, weight)
    _select(part, bias, ids, gates, normalise, scale)


def _in_sixteens(bias: torch.Tensor) -> bool:
    return bias.is_contiguous() and bias.data_ptr() % 16 == 0


def _takes_maps(x: torch.Tensor, weight: torch.Tensor) -> bool:
    fits = x.is_cuda and weight.shape[0] == _EXPERTS and fits_map(x) and fits_map(weight)
    return fits and device_arch(x.device) == 90 and native_reason() is None


def _cut(t: int, d: int, *, alone: bool) -> tuple[int, int, int, int]:
    """Tiles of tokens, spans of columns, steps in all and of a span: as many spans as fit on the card, none empty.

    A product alone leaves one of `PARTS` to the selection.
    """
    tiles, steps = -(-t // _BLOCK_TOKENS), -(-d // _STEP)
    most = max(1, min(_SPANS, _MULTIPROCESSORS // (tiles * (_EXPERTS // _BLOCK_EXPERTS))))
    most = _parts(steps, most) if alone else most
    span = -(-steps // most)
    return tiles, -(-steps // span), steps, span


def _library_parts(t: int, experts: int, d: int) -> int:
    """In how many parts of equal columns the library multiplies, so that there are enough tiles for the card."""
    fits = (parts for most, parts in _LIBRARY_PARTS if t * experts <= most and _divides(d, parts))
    return next(fits, 1)


def _divides(d: int, parts: int) -> bool:
    return d % (parts * _STEP) == 0 and d >= parts * _PART_COLUMNS


def _logits_library(x: torch.Tensor, weight: torch.Tensor, parts: int) -> torch.Tensor:
    """Partial logits float32 [parts, t, experts], by cuBLAS."""
    if parts == 1:
        return product(x, weight)[None]
    columns = (parts, x.shape[1] // parts)
    x, weight = x.unflatten(1, columns).transpose(0, 1), weight.unflatten(1, columns).permute(1, 2, 0)
    return torch.bmm(x, weight, out_dtype=torch.float32)


def _logits_sm90(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Partial logits float32 [spans, t, experts], in CUDA C++."""
    t, d = x.shape
    tiles, spans, steps, span = _cut(t, d, alone=True)
    part = torch.empty(spans, t, _EXPERTS, dtype=torch.float32, device=x.device)
    _product_kernel(0)(
        (tiles, _EXPERTS // _BLOCK_EXPERTS, spans), tensor_map(x, _BLOCK_TOKENS), tensor_map(weight, _BLOCK_EXPERTS),
        part.data_ptr(), t, _EXPERTS, steps, span, device=x.device,
    )  # fmt: skip
    return part


@functools.lru_cache(maxsize=16)
def _blocks_at_once(device: torch.device, k: int) -> int:
    return _product_kernel(k).resident(device)


def _route_sm90(x, weight, bias, ids, gates, normalise: bool, scale: float) -> None:
    """Product and selection in one launch. Its blocks wait for each other: all are on the card at once, two on a multiprocessor.

    Three such launches at the same time, on three streams, could each be there in part and wait for ever.
    """
    t, d = x.shape
    tiles, spans, steps, span = _cut(t, d, alone=False)
    mail = mailbox("router_product", x.device, _SPANS * _ONE_LAUNCH * _EXPERTS, dtype=torch.int32, empty=_EMPTY)
    _product_kernel(ids.shape[1])(
        (tiles, _EXPERTS // _BLOCK_EXPERTS, spans), tensor_map(x, _BLOCK_TOKENS), tensor_map(weight, _BLOCK_EXPERTS),
        mail.data_ptr(), t, _EXPERTS, steps, span, bias.data_ptr(), ids.data_ptr(), gates.data_ptr(), scale, int(normalise),
        device=x.device,
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


def _select_sm90(part, bias, ids, gates, normalise: bool, scale: float) -> None:
    (spans, t, experts), k = part.shape, ids.shape[1]
    items = -(-experts // 128) * 4
    _select_kernel(items, spans, k, experts == 32 * items and _in_sixteens(bias))(
        (-(-t // _SELECT_WARPS), 1, 1),
        part.data_ptr(), bias.data_ptr(), ids.data_ptr(), gates.data_ptr(), t, experts, scale, int(normalise),
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
