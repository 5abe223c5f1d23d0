"""Cache records: written in one pass with the norm and rotation before them, read back, or rounded to.

Many records of 512 bfloat16 channels are written by a kernel with two rows a warp on Hopper (`cuda/records.cu`), the same bytes.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from .capability import device_arch, sm_count
from .checks import power_of_two, require, require_dims, require_dtype, require_inner, require_same_device
from .layouts import FP8, NVFP4, V4, pool_view, record_format
from .native import NativeKernel, native_reason
from .overlap import overlap
from .rows import rms_norm

_FUSED_ROWS = 256  # up to here a launch costs more than the rows
_WARP_ROWS = 1024  # from here on two rows a warp
_WARP_BLOCKS = 2  # of sixteen rows on a multiprocessor
_LIMIT = 1 << 31  # of slots and of a pool's strides there
_PLANAR = 3  # number of V4's planar record inside `cuda/records.cu`


def _alignment(*sizes: int) -> int:
    """The largest power of two up to 16 that divides all of them: how wide an access may be, bytes."""
    return math.gcd(16, *sizes)


@functools.lru_cache(maxsize=32)
def _insert_kernel(fmt: int, blocks: int, norm: bool, turn: bool) -> NativeKernel:
    defines = (f"FORMAT={fmt}", f"NORM={int(norm)}", f"TURN={int(turn)}", f"BLOCKS={blocks}")
    return NativeKernel("records.cu", "insert_records", "PiPfPPiPiPiiiii", threads=256, defines=defines)


def _by_warps(pool: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, geometry: tuple[int, int, int]) -> bool:
    """Whether `cuda/records.cu` writes these rows; geometry is rows a page, bytes between pages and between rows."""
    return (
        rows.shape[0] >= _WARP_ROWS
        and rows.shape[1] == V4.channels
        and rows.dtype == torch.bfloat16
        and slots.is_contiguous()
        and slots.dtype in (torch.int32, torch.int64)
        and _alignment(pool.data_ptr(), *geometry[1:], rows.data_ptr(), 2 * rows.stride(0)) == 16
        and rows.stride(0) < 1 << 15
        and max(geometry[1:]) < _LIMIT
        and device_arch(rows.device) == 90
        and native_reason() is None
    )


def _blocks(rows: torch.Tensor) -> int:
    """As few as still go through the rows in as many rounds as all that fit."""
    pieces = -(-rows.shape[0] // 16)
    return -(-pieces // -(-pieces // (_WARP_BLOCKS * sm_count(rows.device))))


def _page_shift(page_size: int) -> int:
    return page_size.bit_length() - 1 if page_size & (page_size - 1) == 0 else -1


def _insert_by_warps(
    pool: torch.Tensor, slots: torch.Tensor, values: torch.Tensor, fmt: int, geometry: tuple[int, int, int],
    weight: torch.Tensor | None, eps: float, tables: Any, pairs: int,
) -> bool:  # fmt: skip
    """Write the records where `cuda/records.cu` can; else nothing, and False."""
    able = (
        pairs in (0, 32)
        and (
            weight is None or (weight.dtype == torch.bfloat16 and weight.is_contiguous() and weight.data_ptr() % 4 == 0)
        )
        and all(x is None or (x.dtype == torch.float32 and x.data_ptr() % 8 == 0) for x in tables)
        and _by_warps(pool, slots, values, geometry)
    )
    if able:
        page_size, stride_page, stride_row = geometry
        x, scale, cos, sin, at, to = (
            0 if tensor is None else tensor.data_ptr() for tensor in (values, weight, *tables, slots, pool)
        )
        _insert_kernel(fmt, _WARP_BLOCKS, weight is not None, pairs > 0)(
            (_blocks(values), 1, 1), x, 2 * values.stride(0), scale, eps, cos, sin, pairs, at, int(slots.dtype == torch.int64),
            to, stride_page, stride_row, _page_shift(page_size), page_size, values.shape[0], device=values.device,
        )  # fmt: skip
    return able


def norm_rope_insert(
    pool: torch.Tensor,
    slots: torch.Tensor,
    values: torch.Tensor,
    fmt: str,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    table: Any = None,
) -> None:
    """Normalise, rotate, quantise and write records in one pass over the rows, in place.

    Args:
        pool: uint8 pool of `fmt` records.
        slots: int32 or int64 [t]; negative = write nothing. No slot occurs twice.
        values: [t, n], last dimension contiguous.
        fmt: `fp8`, `nvfp4` or `mxfp4`.
        norm_weight: [n] of an RMS norm before everything; None skips it.
        eps: Of that norm.
        table: (cos, sin) float32 [t, pairs] of the positions; None skips the rotation.
    """
    from .kernels.rows import insert_kernel

    require_dims("values", values, 2)
    require_inner("values", values)
    t, n = values.shape
    require(tuple(slots.shape) == (t,), f"slots has shape {tuple(slots.shape)}; values has {t} rows")
    require(n % 2 == 0, f"{n} channels; allowed: even numbers")
    layout = record_format(fmt)
    view = pool_view(pool, layout, n)
    require_same_device(pool, slots, values, norm_weight)
    if not t:
        return
    pairs = table[0].shape[-1] if table is not None else 0
    require(2 * pairs <= n, f"{pairs} pairs do not fit {n} channels")
    tables = (table[0].contiguous(), table[1].contiguous()) if pairs else (None, None)
    geometry = (view.page_size, view.stride_page, view.stride_row)
    if layout in (FP8, NVFP4) and _insert_by_warps(
        pool, slots, values, layout.code, geometry, norm_weight, eps, tables, pairs
    ):
        return
    align = _alignment(pool.data_ptr(), view.stride_page, view.stride_row)
    rows = 2 if t >= 1024 else 1
    insert_kernel[(-(-t // rows),)](
        values, values.stride(0), norm_weight, eps, *tables, pairs, slots, pool, view.stride_page // align,
        view.stride_row // align, t, NORM=norm_weight is not None, PAIRS=pairs, FORMAT=layout.code, PAGE=view.page_size,
        GROUP=layout.group, FLOOR=layout.floor, WIDTH=n, D=power_of_two(n), ROWS=rows, ALIGN=align,
        HARDWARE=device_arch(pool.device) != 0, num_warps=1, **overlap(pool.device),
    )  # fmt: skip


def latent_insert(
    both: torch.Tensor, q_weight: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor, fmt: str, *,
    norm_weight: torch.Tensor, eps: float, table: Any,
) -> torch.Tensor:  # fmt: skip
    """`rms_norm` of the first channels and `norm_rope_insert` of the others, which for few rows is one kernel.

    Args:
        both: [t, q + n], last dimension contiguous: queries' latent, then keys.
        q_weight: [q] of the latent's norm.
        pool, slots, fmt, norm_weight, eps, table: see `norm_rope_insert`; `eps` is of both norms.

    Returns:
        [t, q], the normalised latent.
    """
    from .kernels.rows import latent_insert_kernel

    require_dims("both", both, 2)
    require_inner("both", both)
    t, q = both.shape[0], q_weight.shape[0]
    n, pairs = both.shape[1] - q, table[0].shape[-1]
    if not 0 < t <= _FUSED_ROWS:
        norm_rope_insert(pool, slots, both[:, q:], fmt, norm_weight=norm_weight, eps=eps, table=table)
        return rms_norm(both[:, :q], q_weight, eps)
    require(tuple(slots.shape) == (t,), f"slots has shape {tuple(slots.shape)}; both has {t} rows")
    require(n % 2 == 0 and 2 * pairs <= n, f"{n} channels; allowed: even numbers from {2 * pairs} on")
    layout = record_format(fmt)
    view = pool_view(pool, layout, n)
    require_same_device(both, q_weight, pool, slots, norm_weight, *table)
    latent = torch.empty(t, q, dtype=both.dtype, device=both.device)
    main = max(16, 1 << (q.bit_length() - 1))
    align = _alignment(pool.data_ptr(), view.stride_page, view.stride_row)
    latent_insert_kernel[(2 * t,)](
        both, both.stride(0), q_weight, latent, norm_weight, eps, table[0].contiguous(), table[1].contiguous(), pairs, slots,
        pool, view.stride_page // align, view.stride_row // align, t, Q=q, Q_D=main,
        Q_REST=1 << (q - main - 1).bit_length() if q > main else 0, PAIRS=pairs, FORMAT=layout.code, PAGE=view.page_size,
        GROUP=layout.group, FLOOR=layout.floor, WIDTH=n, D=power_of_two(n), ALIGN=align,
        HARDWARE=device_arch(pool.device) != 0, num_warps=4, **overlap(pool.device),
    )  # fmt: skip
    return latent


def kv_insert(pool: torch.Tensor, slots: torch.Tensor, values: torch.Tensor, fmt: str) -> None:
    """Round vectors and write them as records, in place; arguments as in `norm_rope_insert`."""
    norm_rope_insert(pool, slots, values, fmt)


def kv_gather(pool: torch.Tensor, slots: torch.Tensor, fmt: str, channels: int, dtype: torch.dtype) -> torch.Tensor:
    """Read records back: slots int [...] (absent rows give zeros, whatever the pool holds) to [..., channels]."""
    from .kernels.rows import gather_kernel

    layout = record_format(fmt)
    view = pool_view(pool, layout, channels)
    require_same_device(pool, slots)
    flat = slots.reshape(-1)
    out = torch.empty(flat.shape[0], channels, dtype=dtype, device=pool.device)
    if flat.shape[0]:
        align = _alignment(pool.data_ptr(), view.stride_page, view.stride_row)
        rows = 8 if flat.shape[0] >= 4096 else 2
        gather_kernel[(-(-flat.shape[0] // rows),)](
            pool, flat, flat.shape[0], view.slots, out, view.stride_page // align, view.stride_row // align,
            PAGE=view.page_size, FORMAT=layout.code, GROUP=layout.group, WIDTH=channels, D=power_of_two(channels), ROWS=rows,
            ALIGN=align, HARDWARE=device_arch(pool.device) != 0, num_warps=4 if rows == 8 else 1, **overlap(pool.device),
        )  # fmt: skip
    return out.view(*slots.shape, channels)


def rope_round(x: torch.Tensor, table: Any, fmt: str) -> torch.Tensor:
    """Rotate vectors and round them to what a record of them would give back.

    Args:
        x: [t, heads, n], last dimension contiguous, n a power of two.
        table: (cos, sin) of the t positions, float32 [t, pairs].
        fmt: `fp8`, `nvfp4` or `mxfp4`.

    Returns:
        [t, heads, n] in x's dtype.
    """
    from .kernels.rows import rope_round_kernel

    require_dims("x", x, 3)
    require_inner("x", x)
    t, heads, n = x.shape
    layout = record_format(fmt)
    cos, sin = table[0].contiguous(), table[1].contiguous()
    pairs = cos.shape[-1]
    require(n >= layout.group and n == power_of_two(n), f"{n} channels; allowed: powers of two from {layout.group} on")
    require(2 * pairs <= n, f"{pairs} pairs do not fit {n} channels")
    require_same_device(x, cos, sin)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if t:
        rows = max(1, min(1 << (heads - 1).bit_length(), 1024 // n))
        rope_round_kernel[(t, -(-heads // rows))](
            x, x.stride(0), x.stride(1), out, cos, sin, pairs, heads, PAIRS=pairs, FORMAT=layout.code, GROUP=layout.group,
            FLOOR=layout.floor, WIDTH=n, D=n, ROWS=rows, HARDWARE=device_arch(x.device) != 0, num_warps=1,
            **overlap(x.device),
        )  # fmt: skip
    return out


def _check_v4(pool: torch.Tensor, page_size: int) -> None:
    require_dtype("pool", pool, torch.uint8)
    require_dims("pool", pool, 2)
    require_inner("pool", pool)
    least = V4.record_bytes * page_size
    require(
        pool.shape[1] >= least and pool.stride(0) % 2 == 0 and pool.data_ptr() % 2 == 0,
        f"pool pages have {pool.shape[1]} bytes, {pool.stride(0)} apart; {page_size} rows need {least}, at even addresses",
    )


def v4_insert(
    pool: torch.Tensor,
    slots: torch.Tensor,
    values: torch.Tensor,
    *,
    page_size: int,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    table: Any = None,
) -> None:
    """`norm_rope_insert` for V4's planar 584-byte records, in place.

    Args:
        pool: uint8 [pages, page_bytes], see `layouts.V4`; strides between pages are free.
        slots: int32 or int64 [t], page * page_size + row; negative = write nothing. No slot occurs twice.
        values: [t, 512], last dimension contiguous.
        page_size: Rows of a page.
        norm_weight: [512] of an RMS norm before everything; None skips it.
        eps: Of that norm.
        table: (cos, sin) float32 [t, pairs] of the positions; None skips the rotation.
    """
    from .kernels.rows import insert_v4_kernel

    require_dims("values", values, 2)
    require_inner("values", values)
    t, n = values.shape
    require(n == V4.channels, f"values have {n} channels; a V4 record has {V4.channels}")
    require(tuple(slots.shape) == (t,), f"slots has shape {tuple(slots.shape)}; values has {t} rows")
    _check_v4(pool, page_size)
    require_same_device(pool, slots, values, norm_weight)
    if not t:
        return
    pairs = table[0].shape[-1] if table is not None else 0
    tables = (table[0].contiguous(), table[1].contiguous()) if pairs else (None, None)
    if _insert_by_warps(pool, slots, values, _PLANAR, (page_size, pool.stride(0), 0), norm_weight, eps, tables, pairs):
        return
    align = _alignment(pool.data_ptr(), pool.stride(0))
    rows = 2 if t >= 1024 else 1
    insert_v4_kernel[(-(-t // rows),)](
        values, values.stride(0), norm_weight, eps, *tables, pairs, slots, pool, pool.stride(0) // align, t,
        NORM=norm_weight is not None, PAIRS=pairs, PAGE=page_size, FLOOR=V4.floor, ROWS=rows, ALIGN=align,
        HARDWARE=device_arch(pool.device) != 0, num_warps=1, **overlap(pool.device),
    )  # fmt: skip


def v4_gather(pool: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype, *, page_size: int) -> torch.Tensor:
    """Read planar records back: slots int [...] (absent rows give zeros, whatever the pool holds) to [..., 512]."""
    from .kernels.rows import gather_v4_kernel

    _check_v4(pool, page_size)
    require_same_device(pool, slots)
    flat = slots.reshape(-1)
    out = torch.empty(flat.shape[0], V4.channels, dtype=dtype, device=pool.device)
    if flat.shape[0]:
        align = _alignment(pool.data_ptr(), pool.stride(0))
        rows = 8 if flat.shape[0] >= 4096 else 2
        gather_v4_kernel[(-(-flat.shape[0] // rows),)](
            pool, flat, flat.shape[0], pool.shape[0] * page_size, out, pool.stride(0) // align, PAGE=page_size, ROWS=rows,
            ALIGN=align, HARDWARE=device_arch(pool.device) != 0, num_warps=4 if rows == 8 else 1, **overlap(pool.device),
        )  # fmt: skip
    return out.view(*slots.shape, V4.channels)
