"""Norms, rotary embedding, compressor pooling and Engram rows: one row a program."""

from __future__ import annotations

from typing import Any

import torch

from .capability import device_arch
from .checks import power_of_two, require, require_dims, require_dtype, require_inner, require_same_device
from .overlap import overlap


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`weight * x / sqrt(mean(x^2) + eps)` over the last dimension, float32 inside, rounded once.

    Args:
        x: [..., n], last dimension contiguous.
        weight: [n].
        eps: Added to the mean square.
    """
    from .kernels.rows import rms_norm_kernel

    require_inner("x", x)
    n = x.shape[-1]
    require(tuple(weight.shape) == (n,), f"weight has shape {tuple(weight.shape)}; x has {n} channels")
    flat = x.reshape(-1, n)
    out = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    if flat.shape[0]:
        # A row is two powers of two, so that a width like 5120 leaves no lane idle.
        main = max(16, 1 << (n.bit_length() - 1))
        rms_norm_kernel[(flat.shape[0],)](
            flat, flat.stride(0), weight, out, n, n, eps, D=main, REST=1 << (n - main - 1).bit_length() if n > main else 0,
            num_warps=1 if n <= 512 else 4 if n <= 2048 else 8, **overlap(x.device),
        )  # fmt: skip
    return out.view(x.shape)


def rope(x: torch.Tensor, table: Any, *, inverse: bool = False, inplace: bool = False) -> torch.Tensor:
    """Rotate the last `2 * pairs` channels, adjacent pairs, in float32 (V4.1 section 2.1).

    Args:
        x: [t, n] or [t, heads, n], last dimension contiguous.
        table: (cos, sin) of the t positions, float32 [t, pairs].
        inverse: Rotate back.
        inplace: Write into x (only the rotated channels move).
    """
    from .kernels.rows import rope_kernel

    cos, sin = table[0], table[1]
    require(x.dim() in (2, 3), f"x has shape {tuple(x.shape)}; allowed: [t, n], [t, heads, n]")
    require_inner("x", x)
    view = x.unsqueeze(1) if x.dim() == 2 else x
    t, heads, n = view.shape
    pairs = cos.shape[-1]
    require(
        cos.shape == sin.shape == (t, pairs), f"table has shapes {tuple(cos.shape)}, {tuple(sin.shape)}; x has {t} rows"
    )
    require(2 * pairs <= n, f"{pairs} pairs do not fit {n} channels")
    require_same_device(x, cos, sin)
    cos, sin = cos.contiguous(), sin.contiguous()
    out = view if inplace else torch.empty(view.shape, dtype=x.dtype, device=x.device)
    if t:
        bh = min(8 if not inplace else 64 if t >= 1024 else 16, 1 << (heads - 1).bit_length())
        rope_kernel[(t, -(-heads // bh))](
            view, view.stride(0), view.stride(1), out, out.stride(0), out.stride(1), cos, sin, pairs,
            heads, n, pairs, INVERSE=inverse, COPY=not inplace, BH=bh, D=power_of_two(n), P=power_of_two(pairs), num_warps=4,
            **overlap(x.device),
        )  # fmt: skip
    return x if inplace else out.view(x.shape)


def compress(values: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Pool each group of r tokens, every channel with its own softmax: float32 [g, r, n] twice to float32 [g, n]."""
    from .kernels.rows import compress_kernel

    require_dims("values", values, 3)
    require(values.shape == gates.shape, f"values {tuple(values.shape)} and gates {tuple(gates.shape)} differ")
    require_dtype("values", values, torch.float32)
    require_dtype("gates", gates, torch.float32)
    require_same_device(values, gates)
    g, r, n = values.shape
    out = torch.empty(g, n, dtype=torch.float32, device=values.device)
    if g:
        block = min(512, power_of_two(n))
        compress_kernel[(g, -(-n // block))](
            values.contiguous(),
            gates.contiguous(),
            out,
            n,
            RATIO=r,
            D=block,
            num_warps=4,
            **overlap(values.device),
        )
    return out


def engram_gather(
    table: torch.Tensor, scale: torch.Tensor | None, rows: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Read Engram rows.

    Args:
        table: [rows, n] float, or e4m3 with `scale`.
        scale: E8M0 [rows, ceil(n / 32)] of an e4m3 table.
        rows: int64 [t, m]; the caller guarantees the range.
        dtype: Of the result.

    Returns:
        [t, m * n], the m rows side by side.
    """
    from .kernels.rows import engram_gather_kernel

    require_dims("table", table, 2)
    require(table.is_contiguous(), "table must be contiguous")
    require_same_device(table, scale, rows)
    n = table.shape[1]
    out = torch.empty(rows.shape[0], rows.shape[1] * n, dtype=dtype, device=table.device)
    if rows.numel():
        codes = table.view(torch.uint8) if scale is not None else table
        scales = scale.view(torch.uint8).contiguous() if scale is not None else None
        block = 32 if rows.numel() >= 1 << 16 else 16 if rows.numel() >= 4096 else 8
        engram_gather_kernel[(-(-rows.numel() // block),)](
            codes, scales, rows.contiguous(), rows.numel(), out, HAS_SCALE=scale is not None, WIDTH=n,
            D=max(32, power_of_two(n)), BR=block, HARDWARE=device_arch(table.device) != 0, num_warps=4,
            **overlap(table.device),
        )  # fmt: skip
    return out
