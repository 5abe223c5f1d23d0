"""Dense products of small layers as one kernel each: norm before, residual or SwiGLU after."""

from __future__ import annotations

from dataclasses import dataclass

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


def tiles_for(rows: int, outputs: int, inputs: int, swiglu: bool, dtype: torch.dtype) -> Tiles:
    """The tiles that were fastest on an H200 for such a product of SmolLM2's widths (`benchmarks/cases/gpu_dense.py`)."""
    if dtype == torch.float32:
        return Tiles(32, 32, 32, stages=2)
    if rows <= 96:
        return Tiles(16, 32, 128, norm=1)
    if rows <= 512:
        return Tiles(64, 64) if swiglu else Tiles(64, 32, stages=6)
    if swiglu:
        return Tiles(128, 128, warps=8, stages=3)
    return Tiles(128, 64, warps=8 if inputs > 1024 else 4) if outputs <= 768 else Tiles(64, 64)


def dense_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    swiglu: bool = False,
    out: torch.Tensor | None = None,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """`[norm](x) @ weight^T`, then SwiGLU or the sum with a residual; float32 inside.

    The norm is `x * norm_weight / rms(x)`, its root taken in float32. For few rows it rounds as `llama_norm` does; for more
    x * norm_weight is rounded once, and the row's scale is applied to the float32 product.

    Launched dependently, it asks for its weights before it waits for the kernel ahead of it.

    Args:
        x: [t, k], last dimension contiguous, k <= 4096.
        weight: [n, k], last dimension contiguous; with `swiglu` the n / 2 gates come first. It must not change while kernels
            that were enqueued run.
        norm_weight: [k], or None for no norm.
        eps: Added to the mean square.
        residual: [t, n] to add, or None.
        swiglu: Return `round(silu(gate)) * up` of the rounded halves.
        out: Where to write; may be the residual. [t, n], with `swiglu` [t, n / 2].
        tiles: How to cut the work; default: `tiles_for`.

    Returns:
        `out`, in x's dtype.
    """
    from .kernels.dense import dense_linear_kernel

    for name, tensor in (("x", x), ("weight", weight), ("residual", residual), ("out", out)):
        if tensor is not None:
            require_dims(name, tensor, 2)
            require_inner(name, tensor)
    require_same_device(x, weight, norm_weight, residual, out)
    (t, k), n = x.shape, weight.shape[0]
    require(
        weight.shape[1] == k and weight.dtype == x.dtype,
        f"weight is {tuple(weight.shape)} {weight.dtype}; x has {k} channels in {x.dtype}",
    )
    require(k <= MAX_WIDTH, f"x has {k} channels; allowed: up to {MAX_WIDTH}")
    require(norm_weight is None or tuple(norm_weight.shape) == (k,), f"norm_weight does not have {k} channels")
    if norm_weight is not None:
        require_inner("norm_weight", norm_weight)
    require(
        not swiglu or (n % 2 == 0 and residual is None), "swiglu takes an even number of weight rows and no residual"
    )
    n = n // 2 if swiglu else n
    require(residual is None or tuple(residual.shape) == (t, n), f"residual does not have shape {(t, n)}")
    out = torch.empty(t, n, dtype=x.dtype, device=x.device) if out is None else out
    require(tuple(out.shape) == (t, n) and out.dtype == x.dtype, f"out does not have shape {(t, n)} in {x.dtype}")
    if t:
        cut = tiles_for(t, n, k, swiglu, x.dtype) if tiles is None else tiles
        line = _LINE_BYTES // x.element_size()
        dense_linear_kernel[(-(-t // cut.rows), -(-n // cut.outputs))](
            x, x.stride(0), weight, weight.stride(0), norm_weight, eps, residual,
            0 if residual is None else residual.stride(0), out, out.stride(0), t, N=n, K=k,
            NORM=cut.norm if norm_weight is not None else 0, SWIGLU=swiglu, ADD=residual is not None, BM=cut.rows,
            BN=cut.outputs, BK=cut.inputs, LINE=line, LINES=1 << (-(-k // line) - 1).bit_length(),
            num_warps=cut.warps, num_stages=cut.stages, **overlap(x.device),
        )  # fmt: skip
    return out
