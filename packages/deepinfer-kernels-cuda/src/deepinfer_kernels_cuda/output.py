"""The grouped output projection of attention and Engram's gate: what closes the two lookups."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from .checks import require, require_dims, require_dtype, require_inner, require_same_device
from .overlap import overlap
from .rows import rope

#: Tokens up to which the fused projection wins; above, rotating in place and the library's batched product.
_FUSED_TOKENS = 128


def grouped_output(attended: torch.Tensor, weight: torch.Tensor, table: Any, *, inplace: bool = False) -> torch.Tensor:
    """Rotate attention's result back and project each group of heads (V4.1 section 2.3): the input of `wo_b`.

    Args:
        attended: [t, heads, n], last dimension contiguous.
        weight: `wo_a` in attended's dtype, [groups, rank, heads / groups * n], contiguous.
        table: (cos, sin) of the t positions, float32 [t, pairs]; pairs a power of two.
        inplace: `attended` may be overwritten.

    Returns:
        [t, groups * rank].
    """
    from .kernels.output import grouped_output_kernel

    require_dims("attended", attended, 3)
    require_inner("attended", attended)
    require_dims("weight", weight, 3)
    require_dtype("weight", weight, attended.dtype)
    t, heads, n = attended.shape
    groups, rank, width = weight.shape
    cos, sin = table[0], table[1]
    pairs = cos.shape[-1]
    require(
        heads * n == groups * width and heads % groups == 0,
        f"{heads} heads of {n} do not fill weight {tuple(weight.shape)}",
    )
    require(weight.is_contiguous(), f"weight must be contiguous, has strides {weight.stride()}")
    require(
        cos.shape == sin.shape == (t, pairs), f"table has shapes {tuple(cos.shape)}, {tuple(sin.shape)}; x has {t} rows"
    )
    require_same_device(attended, weight, cos, sin)
    plain = n - 2 * pairs
    block = next((size for size in (64, 32, 16) if plain >= 0 and plain % size == 0), 0)
    power = pairs >= 8 and pairs & (pairs - 1) == 0
    require(plain >= 0, f"{pairs} pairs do not fit {n} channels")
    if t > _FUSED_TOKENS or not block or not power:
        straight = rope(attended, table, inverse=True, inplace=inplace)
        by_group = straight.reshape(t, groups, width).transpose(0, 1)
        return torch.bmm(by_group, weight.transpose(1, 2)).transpose(0, 1).reshape(t, groups * rank)
    out = torch.empty(t, groups * rank, dtype=attended.dtype, device=attended.device)
    if t:
        wide = attended.dtype == torch.float32
        bt, br = (16, 32) if wide else (16 if t <= 16 else 64, 64)
        grouped_output_kernel[(-(-rank // br), groups, -(-t // bt))](
            attended, attended.stride(0), attended.stride(1), cos.contiguous(), sin.contiguous(), pairs, weight, out, t, rank,
            HEADS=heads // groups, WIDTH=n, PAIRS=pairs, BT=bt, BR=br, BK=min(block, 32 if wide else 64), num_warps=4,
            num_stages=2 if wide else 7, **overlap(attended.device),
        )  # fmt: skip
    return out


def engram_gate(
    streams: torch.Tensor, projected: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, *, eps: float,
    inplace: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Add the gated memory value to every stream (V4.1 section 2.8).

    Args:
        streams: [t, S, d], contiguous.
        projected: [t, (S + 1) * d], keys of the S streams, then the value; last dimension contiguous.
        q_weight: [S, d], contiguous.
        k_weight: [S, d], contiguous.
        eps: `rms_norm_eps`.
        inplace: Write into `streams`.

    Returns:
        [t, S, d] in streams' dtype.
    """
    from .kernels.output import engram_gate_kernel

    require_dims("streams", streams, 3)
    t, s, d = streams.shape
    require(streams.is_contiguous(), f"streams must be contiguous, has strides {streams.stride()}")
    want = (t, (s + 1) * d)
    require(tuple(projected.shape) == want, f"projected has shape {tuple(projected.shape)}; it needs {want}")
    require_inner("projected", projected)
    for name, tensor in (("q_weight", q_weight), ("k_weight", k_weight)):
        require(
            tuple(tensor.shape) == (s, d) and tensor.is_contiguous(),
            f"{name} {tuple(tensor.shape)} does not fit [{s}, {d}]",
        )
    require_same_device(streams, projected, q_weight, k_weight)
    out = streams if inplace else torch.empty_like(streams)
    if t:
        main = max(16, 1 << (d.bit_length() - 1))
        engram_gate_kernel[(t, s)](
            streams, projected, projected.stride(0), q_weight, k_weight, out, d, eps, d**-0.5, S=s, D=main,
            REST=1 << (d - main - 1).bit_length() if d > main else 0, num_warps=4, **overlap(streams.device),
        )  # fmt: skip
    return out


def engram_update(
    streams: torch.Tensor, memory: torch.Tensor, wkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, *,
    eps: float,
) -> torch.Tensor:  # fmt: skip
    """The library's product and `engram_gate`: memory [t, m * n], wkv [(S + 1) * d, m * n]; the rest as there."""
    return engram_gate(streams, functional.linear(memory, wkv), q_weight, k_weight, eps=eps)
