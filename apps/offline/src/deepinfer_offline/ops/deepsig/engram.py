"""Engram: hashed n-gram memory that is added to the residual streams. `v41-model` section 2.8."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer_offline.ops.deepsig.formats import ue8m0_values


def engram_rows(tokens: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    """Table rows of each position.

    Args:
        tokens: int64 [t, n], compressed ids of the position and of the n - 1 positions before it (newest first), already
            replaced by the pad id where there is no such position.
        multipliers: int64 [n].
        primes: int64 [(n - 1) * heads], n-gram size major.
        offsets: int64 [(n - 1) * heads], first row of each bucket.

    Returns:
        int64 [t, (n - 1) * heads].
    """
    products = tokens * multipliers  # wraps around in int64, as the hash defines
    heads = primes.shape[0] // (tokens.shape[1] - 1)
    rolling, hashes = products[:, 0], []
    for n in range(1, tokens.shape[1]):
        rolling = rolling ^ products[:, n]
        bucket = primes[(n - 1) * heads : n * heads]
        hashes.append(torch.remainder(rolling.unsqueeze(-1), bucket))
    return torch.cat(hashes, dim=-1) + offsets


def engram_gather(table: Tensor, scale: Tensor | None, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Read table rows.

    Args:
        table: [rows, n], float, or E4M3 with `scale`.
        scale: float8_e8m0fnu [rows, ceil(n / 32)] of an E4M3 table, else None.
        rows: int64 [t, m].
        dtype: of the result.

    Returns:
        [t, m * n], the m rows side by side.
    """
    flat = rows.flatten()
    if scale is None:
        values = table.index_select(0, flat).to(dtype)
    else:
        data = table.view(torch.uint8).index_select(0, flat).view(torch.float8_e4m3fn).float()
        exponents = ue8m0_values(scale.view(torch.uint8).index_select(0, flat))
        values = (data * exponents.repeat_interleave(32, dim=1)[:, : data.shape[1]]).to(dtype)
    return values.view(rows.shape[0], -1)


def engram_update(
    streams: Tensor, memory: Tensor, wkv: Tensor, q_weight: Tensor, k_weight: Tensor, *, eps: float
) -> Tensor:
    """Add the gated memory value to every stream.

    The gate of stream s is sigmoid(sign(g) sqrt(max(|g|, 1e-6))), with g the scaled product of the normalised stream and key.

    Args:
        streams: float [t, S, d].
        memory: float [t, m * n], from `engram_gather`.
        wkv: float [(S + 1) * d, m * n]; S keys, then the value.
        q_weight: float [S, d].
        k_weight: float [S, d].
        eps: `rms_norm_eps`.

    Returns:
        [t, S, d] in streams' dtype.
    """
    count, d = streams.shape[1:]
    keys, value = functional.linear(memory, wkv).float().split((count * d, d), dim=-1)
    keys = keys.unflatten(-1, (count, d))
    hidden = streams.float()
    scale = torch.rsqrt(hidden.square().mean(-1) + eps) * torch.rsqrt(keys.square().mean(-1) + eps) * d**-0.5
    score = (hidden * (q_weight.float() * k_weight.float()) * keys).sum(-1) * scale
    gate = torch.sigmoid(torch.copysign(score.abs().clamp_min(1e-6).sqrt(), score))
    return (hidden + gate.unsqueeze(-1) * value.unsqueeze(1)).to(streams.dtype)
