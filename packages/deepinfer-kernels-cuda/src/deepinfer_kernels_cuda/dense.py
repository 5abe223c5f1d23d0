"""Dense products of small layers as one kernel each: norm before, residual or SwiGLU after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from .checks import require, require_dims, require_inner, require_same_device
from .overlap import overlap

#: Widest input that `dense_linear` takes.
MAX_WIDTH = 4096
_LINE_BYTES = 128


@dataclass(frozen=True, slots=True)
class Tiles:
    """How `dense_linear` is cut.

    Attributes:
        rows: Rows of x a block; a power of two, at least 16.
        outputs: Outputs a block (with SwiGLU: gates, and as many ups).
        inputs: Inputs a step.
        warps: Warps a block.
        stages: Steps in flight.
        norm: 1 normalises rows before the product (least time for few rows), 2 scales them after it.
    """

    rows: int
    outputs: int
    inputs: int = 64
    warps: int = 4
    stages: int = 4
    norm: int = 2


class Weighed(NamedTuple):
    """Rows on their way to a norm: what the product after it needs of them.

    Attributes:
        rows: [t, k], times the norm's weight, rounded once.
        squares: float32 [t, parts], sums of squares of parts of each row before that.
    """

    rows: torch.Tensor
    squares: torch.Tensor


def tiles_for(rows: int, outputs: int, swiglu: bool, dtype: torch.dtype) -> Tiles:
    """The tiles that were fastest on an H200 (2026-11-30) for such a product of SmolLM2's widths, weighed for or by a norm.

    At 8, 64, 256, 512 and 1,000 rows, in CUDA graphs over 100 MB of weights (`benchmarks/cases/gpu_dense.py`).
    """
    if dtype == torch.float32:
        return Tiles(32, 32, 32, stages=2)
    if rows <= 32:
        return Tiles(16, 32, 128, norm=1)
    if rows <= 96:
        return Tiles(64, 32) if outputs > 768 else Tiles(16, 32, 128)
    if rows <= 384:
        return Tiles(64, 64) if swiglu else Tiles(64, 32, stages=6)
    if rows <= 768:
        return Tiles(64, 64, stages=4 if swiglu else 6)
    return Tiles(128, 128, warps=8, stages=3) if swiglu else Tiles(128, 64, warps=8)


def dense_linear(
    x: torch.Tensor | Weighed,
    weight: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    swiglu: bool = False,
    out: torch.Tensor | None = None,
    weighed: Weighed | None = None,
    next_weight: torch.Tensor | None = None,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """`[norm](x) @ weight^T`, then SwiGLU or the sum with a residual; float32 inside.

    The norm is `x * norm_weight / rms(x)`, its root taken in float32. For few rows that are not weighed it rounds as
    `llama_norm` does; else x * norm_weight is rounded once, and the row's scale is applied to the float32 product.

    Launched dependently, it asks for `weight` and `norm_weight` before it waits for the kernel ahead of it.

    Args:
        x: [t, k], last dimension contiguous, k <= 4096. `Weighed` rows are normalised too, with the weight that they have.
        weight: [n, k], last dimension contiguous; with `swiglu` the n / 2 gates come first. It must not change while kernels
            that were enqueued run.
        norm_weight: [k], or None for no norm.
        eps: Added to the mean square.
        residual: [t, n] to add, or None.
        swiglu: Return `round(silu(gate)) * up` of the rounded halves.
        out: Where to write; may be the residual. [t, n], with `swiglu` [t, n / 2].
        weighed: Where to leave the result for the norm after it, from `weighed_like`.
        next_weight: [n] of that norm; comes with `weighed`.
        tiles: How to cut the work; default: `tiles_for`.

    Returns:
        `out`, in x's dtype.
    """
    from .kernels.dense import dense_linear_kernel

    squares = None
    if isinstance(x, Weighed):
        require(norm_weight is None, "weighed rows have their norm_weight already")
        x, squares = x
        require(
            squares.dim() == 2
            and len(squares) == len(x)
            and squares.dtype == torch.float32
            and squares.is_contiguous(),
            lambda: f"squares are {tuple(squares.shape)} {squares.dtype}; weighed rows are {tuple(x.shape)}",
        )
    for name, tensor in (("x", x), ("weight", weight), ("residual", residual), ("out", out)):
        if tensor is not None:
            require_dims(name, tensor, 2)
            require_inner(name, tensor)
    require_same_device(x, weight, norm_weight, residual, out, next_weight, squares, *(weighed or ()))
    (t, k), n = x.shape, weight.shape[0]
    fits = weight.shape[1] == k and weight.dtype == x.dtype
    require(fits, lambda: f"weight is {tuple(weight.shape)} {weight.dtype}; x has {k} channels in {x.dtype}")
    require(k <= MAX_WIDTH, lambda: f"x has {k} channels; allowed: up to {MAX_WIDTH}")
    require(norm_weight is None or tuple(norm_weight.shape) == (k,), lambda: f"norm_weight does not have {k} channels")
    if norm_weight is not None:
        require_inner("norm_weight", norm_weight)
    if next_weight is not None:
        require_inner("next_weight", next_weight)
    require(not swiglu or (n % 2 == 0 and residual is None), "swiglu takes an even number of weight rows, no residual")
    n = n // 2 if swiglu else n
    require(residual is None or tuple(residual.shape) == (t, n), lambda: f"residual does not have shape {(t, n)}")
    out = torch.empty(t, n, dtype=x.dtype, device=x.device) if out is None else out
    require(
        tuple(out.shape) == (t, n) and out.dtype == x.dtype, lambda: f"out does not have shape {(t, n)} in {x.dtype}"
    )
    require((weighed is None) == (next_weight is None), "weighed and next_weight come together")
    require(next_weight is None or tuple(next_weight.shape) == (n,), lambda: f"next_weight does not have {n} channels")
    if t:
        cut = tiles_for(t, n, swiglu, x.dtype) if tiles is None else tiles
        spans = -(-n // cut.outputs)
        scaled, next_squares = (None, None) if weighed is None else weighed
        require(
            next_squares is None
            or (
                tuple(next_squares.shape) == (t, spans)
                and next_squares.is_contiguous()
                and next_squares.dtype == torch.float32
            ),
            lambda: f"weighed does not have {spans} parts",
        )
        require(
            scaled is None or (scaled.shape == out.shape and scaled.dtype == out.dtype and scaled.is_contiguous()),
            lambda: f"weighed rows do not have shape {(t, n)} in {x.dtype}, contiguous",
        )
        parts = 1 if squares is None else squares.shape[1]
        line = _LINE_BYTES // x.element_size()
        norm = 3 if squares is not None else cut.norm if norm_weight is not None else 0
        dense_linear_kernel[(-(-t // cut.rows), spans)](
            x, x.stride(0), weight, weight.stride(0), norm_weight, eps, squares, residual,
            0 if residual is None else residual.stride(0), out, out.stride(0), next_weight, scaled, next_squares, t, parts,
            N=n, K=k, NORM=norm, SWIGLU=swiglu, ADD=residual is not None, BM=cut.rows, BN=cut.outputs, BK=cut.inputs,
            LINE=line, LINES=_power(-(-k // line)), PARTS=max(32, _power(parts)),
            SCALE=weighed is not None, num_warps=cut.warps, num_stages=cut.stages, **overlap(x.device),
        )  # fmt: skip
    return out


def weighed_like(out: torch.Tensor, tiles: Tiles | None = None) -> Weighed:
    """Room for a product's result `out` on its way to a norm."""
    rows, width = out.shape
    cut = tiles_for(rows, width, False, out.dtype) if tiles is None else tiles
    squares = torch.empty(rows, -(-width // cut.outputs), dtype=torch.float32, device=out.device)
    return Weighed(torch.empty_like(out, memory_format=torch.contiguous_format), squares)


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()
