"""Hyper-connections: the fused step, and its parts under the names of the portable ops.

On Hopper a whole seam of four bfloat16 streams is one kernel (`cuda/mhc.cu`). Of what is left, up to `_ONE_PASS_TOKENS` tokens
take the one-pass kernel and its closing kernel (`kernels/mhc_stream.py`); everything else, and Triton's interpreter, the
general kernels (`kernels/mhc.py`), which are faster for many tokens (H200).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from .capability import device_arch
from .checks import require, require_dims, require_dtype, require_same_device
from .errors import ArgumentError
from .mailboxes import mailbox
from .native import NativeError, NativeKernel, native_reason
from .overlap import overlap, overlaps


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


_LOG = logging.getLogger(__name__)
_ONE_PASS_TOKENS = 1536
_SPLIT_CACHE = WeakTensorKeyDictionary()


def _cached(fn: torch.Tensor, name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`make(fn)`, made once for each version of a tensor."""
    made = _SPLIT_CACHE.setdefault(fn, {})
    have = made.get(name)
    if have is None or have[0] != fn._version:
        have = made[name] = (fn._version, make(fn))
    return have[1]


def split_projection(fn: torch.Tensor) -> torch.Tensor:
    """`fn` as the sum of two bfloat16 matrices (16 bits of mantissa), padded: [64, S * d]; made once a tensor.

    bfloat16 streams times it on the matrix units then differ from float32 by 2^-17 relative, below the streams' own 2^-9.
    """
    half = max(16, 1 << (fn.shape[0] - 1).bit_length())
    split = torch.zeros(2 * half, fn.shape[1], dtype=torch.bfloat16, device=fn.device)
    split[: fn.shape[0]] = fn
    split[half : half + fn.shape[0]] = fn - split[: fn.shape[0]].float()
    return split


def chunk_projection(fn: torch.Tensor) -> torch.Tensor:
    """The same two matrices for four streams as the one-pass kernel reads them: [4 d / 64, 3, 2, 2, 8, 32].

    Rows of a chunk of 64 columns: 16 of comb high, 16 low, then of each stream pre high, pre low, post high, post low.
    """
    high = fn.to(torch.bfloat16)
    low = (fn - high.float()).to(torch.bfloat16)
    gates = torch.stack((high[:4], low[:4], high[4:8], low[4:8]), 1).flatten(0, 1)
    rows = torch.cat((high[8:], low[8:], gates)).unflatten(1, (-1, 2, 32))  # [48, chunks, 2, 32]
    # Within 16 rows: halves of 8 rows, halves of 32 columns, then a row's 64 bytes after the other's.
    return rows.unflatten(0, (3, 2, 8)).permute(3, 0, 1, 4, 2, 5).contiguous()


def lane_projection(fn: torch.Tensor) -> torch.Tensor:
    """The same two matrices as the whole step in one kernel reads them: [d / 32, 2, 4, 3, 32, 8], for d channels of four streams.

    Of each half of 32 channels and each stream there are 16 rows of comb's high parts, of its low parts, and 8 of both of pre
    and post, each as the fragments of 32 lanes.
    """
    high = fn.to(torch.bfloat16)
    low = (fn - high.float()).to(torch.bfloat16)
    rows = torch.stack((high[8:], low[8:], torch.cat((high[:8], low[:8]))))
    # Rows: tile, half, row; columns: stream, group, quarter of a group (a lane's 16 bytes), half of it, pair, element.
    rows = rows.unflatten(1, (2, 8)).unflatten(3, (4, -1, 4, 2, 2, 2))
    made = rows.permute(4, 6, 3, 0, 2, 5, 7, 1, 8).contiguous().flatten(4, 5).flatten(5)
    # The kernel reads this before it waits for the kernels ahead. One that does not overlap lies between, this once.
    torch.zeros(1, device=fn.device)
    return made


class _Partial(NamedTuple):
    mix: torch.Tensor
    square: torch.Tensor
    spans: int
    rows: int
    low: int


def _rows_pass(streams, *, output=None, post=None, comb=None, pre=None, weight=None, eps=0.0, square=False):
    """Run the row kernel; returns (new streams, collapsed and possibly normalised, square sums)."""
    from .kernels.mhc import mhc_row_kernel

    t, s, d = streams.shape
    new = torch.empty_like(streams) if output is not None else streams
    out = streams.new_empty(t, d) if pre is not None else streams
    squares = torch.empty(t, dtype=torch.float32, device=streams.device) if square else streams
    main = max(16, 1 << (d.bit_length() - 1))
    rest = 1 << (d - main - 1).bit_length() if d > main else 0
    if t:
        mhc_row_kernel[(t,)](
            streams, output, post, comb, pre, weight, new, out, squares, d, eps,
            HAS_POST=output is not None, HAS_COLLAPSE=pre is not None, HAS_NORM=weight is not None, HAS_SQUARE=square,
            S=s, D=main, REST=rest, num_warps=4, **overlap(streams.device),
        )  # fmt: skip
    return new, out, squares


def _project(streams: torch.Tensor, fn: torch.Tensor, squares: torch.Tensor) -> _Partial:
    """Partial products of the streams with fn."""
    from .kernels.mhc import mhc_project_kernel

    t, s, d = streams.shape
    split = streams.dtype == torch.bfloat16
    rows = max(16, 1 << (s * (s + 2) - 1).bit_length()) * (2 if split else 1)
    bt, bk = (16, 32) if not split else (16, 128) if t <= 256 else (64, 64)
    width = s * d
    tiles = -(-t // bt)
    span = max(bk * 2, -(-width // max(1, min(32, round(528 / tiles)))))
    span = -(-span // bk) * bk
    spans = -(-width // span)
    part = torch.empty(spans, rows, t, dtype=torch.float32, device=streams.device)
    mhc_project_kernel[(tiles, spans)](
        streams, _cached(fn, "split", split_projection) if split else fn, part, t, width, rows if split else fn.shape[0],
        ROWS=rows, BT=bt, BK=bk, SPAN=span, num_warps=4, num_stages=4 if split else 1, **overlap(streams.device),
    )  # fmt: skip
    return _Partial(part, squares, spans, rows, rows // 2 if split else 0)


def _finish(
    streams: torch.Tensor, part: _Partial, base, scale, iterations: int, eps: float, norm_eps: float
) -> HyperMix:
    from .kernels.mhc import mhc_finish_kernel

    t, s, d = streams.shape
    mix = HyperMix(
        *(torch.empty(t, *shape, dtype=torch.float32, device=streams.device) for shape in ((s,), (s,), (s, s)))
    )
    bt = 1 if t <= 1024 else 4
    mhc_finish_kernel[(-(-t // bt),)](
        part.mix, part.square, base, scale, *mix, t, d, part.spans, iterations, eps, norm_eps,
        S=s, ROWS=part.rows, LOW=part.low, SPANS=1 << (part.spans - 1).bit_length(), BT=bt, num_warps=1,
        **overlap(streams.device),
    )  # fmt: skip
    return mix


def _one_pass(streams: torch.Tensor) -> bool:
    return (
        streams.shape[0] <= _ONE_PASS_TOKENS
        and streams.dtype == torch.bfloat16
        and streams.shape[1] == 4
        and streams.shape[2] % 64 == 0
        and device_arch(streams.device) in (90, 100)
    )


def _stream(streams, fn, base, scale, *, iterations, eps, mix_eps, output=None, post=None, comb=None, pre=None,
            weight=None, norm_eps=0.0) -> MhcStep:  # fmt: skip
    """The one-pass kernel and its closing kernel; without `pre` the last field of the result is the streams."""
    from .kernels.mhc_stream import mhc_close_kernel, mhc_stream_kernel

    t, s, d = streams.shape
    device = streams.device
    new = torch.empty_like(streams) if output is not None else streams
    x = streams.new_empty(t, d) if pre is not None else streams
    mix = HyperMix(*(torch.empty(t, *shape, dtype=torch.float32, device=device) for shape in ((s,), (s,), (s, s))))
    if not t:
        return MhcStep(new, mix, x)
    spans = d // 64
    part = torch.empty(t, spans, 32, dtype=torch.float32, device=device)
    squares = torch.empty(t, spans, 2, dtype=torch.float32, device=device)
    # Few tokens: a warp a block, one tile. More: four warps share what they read of the projection, twice.
    warps, tiles = (1, 1) if t <= 64 else (4, 2)
    mhc_stream_kernel[(spans, -(-t // (8 * warps * tiles)))](
        streams, output, post, comb, pre, _cached(fn, "chunks", chunk_projection), new, x, part, squares, t, d, spans, tiles,
        HAS_POST=output is not None, HAS_COLLAPSE=pre is not None, WARPS=warps, num_warps=warps,
        launch_pdl=overlaps(device),
    )  # fmt: skip
    main = 1 << (d.bit_length() - 1)
    blocks = -(-t // 8)
    mhc_close_kernel[(blocks + (t if weight is not None else 0),)](
        part, squares, base, scale, x, weight, *mix, t, spans, d, eps, mix_eps, norm_eps, blocks,
        HAS_NORM=weight is not None, ITERATIONS=iterations, SPANS=max(16, 1 << (spans - 1).bit_length()), D=main,
        REST=1 << (d - main - 1).bit_length() if d > main else 0, WARPS=4, TILE=8, num_warps=4, launch_pdl=overlaps(device),
    )  # fmt: skip
    return MhcStep(new, mix, x)


_TEAM = 16  # blocks that share rows in `cuda/mhc.cu`
_ROW_TOKENS = range(1, 1 << 30)  # where it is faster than Triton's kernels (H200)


@functools.lru_cache(maxsize=8)
def _row_kernel(groups: int) -> NativeKernel:
    """The kernel for 512 `groups` channels; shared memory as `cuda/mhc.cu` lays it out."""
    warps, row = 12 if groups >= 8 else groups, 64 * groups
    rows = 4 * (8 * row + 256)
    sums = 2 * groups * 8 * 28 * 4 + 32 * 17 * 4
    shared = groups * 12288 + warps * 2 * 2560 + rows + row + 4 * 8 * 96 + sums + 8 * (2 * 4 + 2 * 8 + 2 + groups + 1)
    return NativeKernel("mhc.cu", "mhc_step", "P" * 15 + "iifff", threads=32 * (warps + 4), shared=shared,
                        defines=(f"GROUPS={groups}", f"SHARED={shared}"))  # fmt: skip


@functools.lru_cache(maxsize=16)
def _teams(device: torch.device, groups: int) -> int:
    """How many teams of blocks the device holds at once, in pairs or not; 0 where the kernel cannot run.

    A team's blocks wait for each other and for nobody else. The device begins a launch's blocks in order, as far as is known, so
    a team that waits has all its blocks on the device or next in line, unless other launches of this kernel wait in the same way:
    nine at once, each with a team in part, could fill an H200.
    """
    if device_arch(device) != 90 or native_reason() is not None:
        return 0
    try:
        kernel = _row_kernel(groups)
        return min(kernel.resident(device), 2 * kernel.clusters(device, 2)) // _TEAM
    except NativeError as failure:
        _LOG.warning("hyper-connections of %d channels take the Triton kernels: %s", 512 * groups, failure)
        return 0


def _whole(streams: torch.Tensor, halves: tuple[torch.Tensor, ...], singles: tuple[torch.Tensor, ...]) -> bool:
    """Whether one kernel does the whole step; `halves` it takes in bfloat16, `singles` in float32."""
    t, s, d = streams.shape
    return (
        t in _ROW_TOKENS
        and s == 4
        and d % 1024 == 0
        and d <= 5120
        and all(x.dtype == torch.bfloat16 for x in (streams, *halves))
        and all(x.dtype == torch.float32 for x in singles)
        and all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in (streams, *halves, *singles))
        and _teams(streams.device, d // 512) > 0
    )


def _whole_step(streams, fn, base, scale, *, pre, weight, norm_eps, iterations, eps, output, post, comb) -> MhcStep:
    """The whole step in one kernel."""
    t, s, d = streams.shape
    device, groups = streams.device, d // 512
    new, x = torch.empty_like(streams), streams.new_empty(t, d)
    mix = HyperMix(*(torch.empty(t, *shape, dtype=torch.float32, device=device) for shape in ((s,), (s,), (s, s))))
    teams = _teams(device, groups)
    # 64 words that count tiles, then those of each team.
    mail = mailbox("mhc_step", device, 64 + teams * 16 * 8 * _TEAM * 33, dtype=torch.int64, empty=0)
    packed = _cached(fn, "lanes", lane_projection)
    tensors = (streams, output, post, comb, pre, packed, base, scale, weight, new, x, *mix, mail)
    run = min(teams, -(-t // 8))  # an even number of teams in pairs, which share what they read of the projection
    _row_kernel(groups)(
        (run * _TEAM, 1, 1), *(tensor.data_ptr() for tensor in tensors), t, iterations, eps, norm_eps, norm_eps, device=device,
        cluster=2 - run % 2,
    )  # fmt: skip
    return MhcStep(new, mix, x)


def _check(streams: torch.Tensor, **others: torch.Tensor | None) -> None:
    require_dims("streams", streams, 3)
    require_dtype("streams", streams, torch.bfloat16, torch.float32)
    s = streams.shape[1]
    require(s in (1, 2, 4), f"{s} streams; allowed: 1, 2, 4")
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

    Launched dependently: fn, base, scale and norm_weight must not be written by kernels that are still enqueued.
    """
    _check(streams, fn=fn, pre=pre, output=output, post=post, comb=comb)
    require_same_device(streams, base, scale, norm_weight)
    t, s, d = streams.shape
    sizes = {"fn": (fn, (s * (s + 2), s * d)), "base": (base, (s * (s + 2),)), "scale": (scale, (3,)),
             "norm_weight": (norm_weight, (d,)), "pre": (pre, (t, s)), "output": (output, (t, d)), "post": (post, (t, s)),
             "comb": (comb, (t, s, s))}  # fmt: skip
    for name, (tensor, shape) in sizes.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ArgumentError(f"{name} has shape {tuple(tensor.shape)}; it needs {shape}")
    require((output is None) == (post is None) == (comb is None), "output, post and comb come together")
    if output is not None and _whole(streams, (output, norm_weight), (pre, post, comb, base, scale)):
        return _whole_step(streams, fn, base, scale, pre=pre, weight=norm_weight, norm_eps=norm_eps, iterations=iterations,
                             eps=eps, output=output, post=post, comb=comb)  # fmt: skip
    if _one_pass(streams):
        return _stream(streams, fn, base, scale, iterations=iterations, eps=eps, mix_eps=norm_eps, output=output, post=post,
                       comb=comb, pre=pre, weight=norm_weight, norm_eps=norm_eps)  # fmt: skip
    new, x, squares = _rows_pass(streams, output=output, post=post, comb=comb, pre=pre, weight=norm_weight, eps=norm_eps,
                                 square=True)  # fmt: skip
    mix = _finish(streams, _project(new, fn, squares), base, scale, iterations, eps, norm_eps)
    return MhcStep(new, mix, x)


def mhc_pre(
    streams: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, *, iterations: int, eps: float,
    norm_eps: float,
) -> HyperMix:  # fmt: skip
    """A site's coefficients; arguments as in `mhc_step`."""
    _check(streams, fn=fn)
    if _one_pass(streams):
        return _stream(streams, fn, base, scale, iterations=iterations, eps=eps, mix_eps=norm_eps).mix
    part = _project(streams, fn, _rows_pass(streams, square=True)[2])
    return _finish(streams, part, base, scale, iterations, eps, norm_eps)


def mhc_collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """Sum over streams of pre * stream: [t, S, d] and float32 [t, S] to [t, d], streams' dtype."""
    _check(streams, pre=pre)
    return _rows_pass(streams, pre=pre)[1]


def mhc_post(output: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """new_o = post_o * output + sum_i comb[i, o] * streams_i: [t, S, d] in output's dtype."""
    _check(streams, output=output, post=post, comb=comb)
    return _rows_pass(streams, output=output, post=post, comb=comb)[0]
