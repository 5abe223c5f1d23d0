"""Hyper-connections: the fused step, and its parts under the names of the portable ops."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .checks import require, require_dims, require_dtype, require_same_device


class HyperMix(NamedTuple):
    """Mixing coefficients of one site, float32: pre [t, S], post [t, S], comb [t, S, S] as (from, to)."""

    pre: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor


class MhcStep(NamedTuple):
    """What `mhc_step` returns: the new streams [t, S, d], the site's mix, and the normalised sublayer input [t, d]."""

    streams: torch.Tensor
    mix: HyperMix
    x: torch.Tensor


def _launch(streams, *, output=None, post=None, comb=None, pre=None, fn=None):  # noqa: ANN001, ANN202
    """Run the streaming kernel; returns (new streams, collapsed, mix partials, square partials, spans, rows)."""
    from .kernels.mhc import mhc_stream_kernel

    t, s, d = streams.shape
    rows = max(16, 1 << (s * (s + 2) - 1).bit_length())
    bt = 16 if t <= 256 else 32
    bc = min(64, max(16, 1 << (d - 1).bit_length()))
    span = bc * (2 if t <= 256 else 8)
    spans = -(-d // span)
    new = torch.empty_like(streams) if output is not None else streams
    collapsed = streams.new_empty(t, d) if pre is not None else streams
    mix_part = torch.empty(spans, t, rows, dtype=torch.float32, device=streams.device) if fn is not None else streams
    square = torch.empty(spans, t, dtype=torch.float32, device=streams.device) if fn is not None else streams
    mhc_stream_kernel[(-(-t // bt), spans)](
        streams, output, post, comb, pre, fn, new, collapsed, mix_part, square, t, d,
        HAS_POST=output is not None, HAS_COLLAPSE=pre is not None, HAS_MIX=fn is not None,
        PRECISION="ieee" if streams.dtype == torch.float32 else "tf32x3",
        S=s, ROWS=rows, BT=bt, BC=bc, SPAN=span, num_warps=4, num_stages=2,
    )  # fmt: skip
    return new, collapsed, mix_part, square, spans, rows


def _finish(streams, partial, base, scale, iterations, eps, mix_eps, collapsed, norm_weight, norm_eps):  # noqa: ANN001, ANN202
    from .kernels.mhc import mhc_finish_kernel

    t, s, d = streams.shape
    mix_part, square, spans, rows = partial
    has_mix, has_norm = base is not None, norm_weight is not None
    mix = HyperMix(*(torch.empty(t, *shape, dtype=torch.float32, device=streams.device) for shape in ((s,), (s,), (s, s))))
    x = torch.empty_like(collapsed) if has_norm else streams
    mhc_finish_kernel[(t,)](
        mix_part, square, base, scale, *mix, collapsed, norm_weight, x, t, d, spans,
        iterations, eps, mix_eps, norm_eps, HAS_MIX=has_mix, HAS_NORM=has_norm,
        S=s, ROWS=rows, D=max(16, 1 << (d - 1).bit_length()), num_warps=4,
    )  # fmt: skip
    return mix, x


def _check(streams: torch.Tensor, **others: torch.Tensor | None) -> None:
    require_dims("streams", streams, 3)
    require_dtype("streams", streams, torch.bfloat16, torch.float32)
    s = streams.shape[1]
    require(s & (s - 1) == 0 and s <= 8, f"{s} streams; allowed: 1, 2, 4, 8")
    for name, tensor in {"streams": streams, **others}.items():
        if tensor is not None:
            require(tensor.is_contiguous(), f"{name} must be contiguous, has strides {tensor.stride()}")
    require_same_device(streams, *others.values())


def mhc_step(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    pre: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_eps: float,
    iterations: int,
    eps: float,
    output: torch.Tensor | None = None,
    post: torch.Tensor | None = None,
    comb: torch.Tensor | None = None,
) -> MhcStep:
    """One whole seam between sublayers (V4.1 section 2.2): update, predict the next mix, collapse, normalise.

    Args:
        streams: [t, S, d] bfloat16 or float32, contiguous.
        fn: float32 [S * (S + 2), S * d].
        base: float32 [S * (S + 2)].
        scale: float32 [3].
        pre: float32 [t, S] carried from the previous site; what the streams are collapsed with.
        norm_weight: [d] of the RMS norm after the collapse.
        norm_eps: `rms_norm_eps`, of both normalisations.
        iterations: Sinkhorn iterations.
        eps: `hc_eps`.
        output: The previous sublayer's output [t, d]; None leaves the streams as they are.
        post: float32 [t, S] of the previous site, with `output`.
        comb: float32 [t, S, S] of the previous site, with `output`.
    """
    _check(streams, fn=fn, pre=pre, output=output, post=post, comb=comb)
    require((output is None) == (post is None) == (comb is None), "output, post and comb come together")
    new, collapsed, *partial = _launch(streams, output=output, post=post, comb=comb, pre=pre, fn=fn)
    mix, x = _finish(streams, partial, base, scale, iterations, eps, norm_eps, collapsed, norm_weight, norm_eps)
    return MhcStep(new, mix, x)


def mhc_pre(
    streams: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, *, iterations: int, eps: float,
    norm_eps: float,
) -> HyperMix:  # fmt: skip
    """A site's coefficients; arguments as in `mhc_step`."""
    _check(streams, fn=fn)
    _, collapsed, *partial = _launch(streams, fn=fn)
    return _finish(streams, partial, base, scale, iterations, eps, norm_eps, collapsed, None, norm_eps)[0]


def mhc_collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """Sum over streams of pre * stream: [t, S, d] and float32 [t, S] to [t, d], streams' dtype."""
    _check(streams, pre=pre)
    return _launch(streams, pre=pre)[1]


def mhc_post(output: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """new_o = post_o * output + sum_i comb[i, o] * streams_i: [t, S, d] in output's dtype."""
    _check(streams, output=output, post=post, comb=comb)
    return _launch(streams, output=output, post=post, comb=comb)[0]
