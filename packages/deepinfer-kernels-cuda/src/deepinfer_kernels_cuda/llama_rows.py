"""Row ops of Llama-class layers, rounded where the models round: norm, rotation with cache insert, SwiGLU, argmax."""

from __future__ import annotations

import torch

from .checks import require, require_dims, require_dtype, require_inner, require_same_device
from .overlap import overlap


def _power(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def cache_slots(
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    write_floors: torch.Tensor,
    block_table: torch.Tensor,
    *,
    block: int,
    tokens: int,
    max_queries: int,
) -> torch.Tensor:
    """The flat cache slot of every token of ragged chunks that end their sequences.

    Args:
        query_starts: int32 [R + 1], first token of each chunk.
        seq_lens: int32 [R], positions of each sequence, its chunk included.
        write_floors: int32 [R]; positions below it get slot -1.
        block_table: int32 [R, columns], last dimension contiguous.
        block: positions of a block.
        tokens: T, tokens of all chunks, or more: those past the last chunk get slot -1, if chunks may have several tokens.
        max_queries: tokens of the longest chunk.

    Returns:
        int64 [T].
    """
    from .kernels.llama_rows import cache_slots_kernel
    from .kernels.ragged import ragged_slots_kernel

    require_inner("block_table", block_table)
    require_same_device(query_starts, seq_lens, write_floors, block_table)
    slots = torch.empty(tokens, dtype=torch.int64, device=block_table.device)
    rows = seq_lens.shape[0]
    if tokens and rows and max_queries == 1:
        cache_slots_kernel[(rows,)](
            query_starts, seq_lens, write_floors, block_table, block_table.stride(0), slots, BLOCK=block, num_warps=1,
            **overlap(slots.device),
        )  # fmt: skip
    elif tokens and rows:
        ragged_slots_kernel[(-(-tokens // 128),)](
            query_starts, seq_lens, write_floors, block_table, block_table.stride(0), slots, rows, tokens,
            rows.bit_length(), BLOCK=block, BT=128, num_warps=4, **overlap(slots.device),
        )  # fmt: skip
    return slots


def llama_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`weight * round(x / rms(x))` over the last dimension, float32 inside, the inner rounding to x's dtype, as Llama has it.

    Args:
        x: [t, n], last dimension contiguous, n <= 16384.
        weight: [n].
        eps: Added to the mean square.
    """
    from .kernels.llama_rows import llama_norm_kernel

    require_dims("x", x, 2)
    require_inner("x", x)
    t, n = x.shape
    require(tuple(weight.shape) == (n,), lambda: f"weight has shape {tuple(weight.shape)}; x has {n} channels")
    require(n <= 16384, lambda: f"x has {n} channels; allowed: up to 16384")
    require_same_device(x, weight)
    out = torch.empty(t, n, dtype=x.dtype, device=x.device)
    if t:
        d = _power(n)
        rows = 1 if t <= 264 else max(1, 4096 // d)
        warps = 8 if d > 4096 else 4
        llama_norm_kernel[(-(-t // rows),)](
            x, x.stride(0), weight, out, out.stride(0), t, n, eps, D=d, BR=rows, num_warps=warps, **overlap(x.device)
        )
    return out


def rope_insert(
    qkv: torch.Tensor,
    rope: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Rotate queries in place, rotate keys, and write keys and values to their slots of the paged cache.

    Args:
        qkv: [T, (heads + 2 * kv_heads) * d], queries, keys, values; the queries are overwritten.
        rope: float32 [positions, 2, d / 2], cos and sin; channel pairs (k, k + d / 2).
        positions: int64 [T].
        slots: int64 [T], block * block_size + offset; -1 = not written.
        keys: [blocks, block_size, kv_heads, d], last dimension contiguous.
        values: Like keys.
        heads: Query heads.
        q_norm, k_norm: RMS weights [d] applied before the rotation, or None.
        eps: Of those norms.
    """
    from .kernels.llama_rows import rope_insert_kernel

    require_dims("qkv", qkv, 2)
    require_dims("keys", keys, 4)
    require_inner("qkv", qkv)
    require_inner("keys", keys)
    require_inner("values", values)
    t, block, kv_heads, d = qkv.shape[0], *keys.shape[1:]
    require(
        qkv.shape[1] == (heads + 2 * kv_heads) * d,
        lambda: f"qkv has {qkv.shape[1]} channels; {heads} + 2 * {kv_heads} heads of {d} have others",
    )
    require(values.shape == keys.shape, lambda: f"values {tuple(values.shape)} and keys {tuple(keys.shape)} differ")
    require(
        rope.is_contiguous() and rope.shape[1:] == (2, d // 2),
        lambda: f"rope has shape {tuple(rope.shape)}; it needs [n, 2, {d // 2}]",
    )
    require((q_norm is None) == (k_norm is None), "q_norm and k_norm come together")
    require_dtype("keys", keys, qkv.dtype)
    require_same_device(qkv, rope, positions, slots, keys, values, q_norm, k_norm)
    if t:
        total = heads + 2 * kv_heads
        bh = min(16, _power(total))
        rope_insert_kernel[(t, -(-total // bh))](
            qkv, qkv.stride(0), rope, positions, slots, keys, values,
            keys.stride(0), keys.stride(1), keys.stride(2), values.stride(0), values.stride(1), values.stride(2),
            q_norm, k_norm, eps, HEADS=heads, KV_HEADS=kv_heads, HALF=d // 2, PAIRS=_power(d // 2), BLOCK=block,
            HAS_NORM=q_norm is not None, BH=bh, num_warps=2 if d <= 64 else 4, **overlap(qkv.device),
        )  # fmt: skip


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`round(silu(gate)) * up`: [t, 2 * width], gate first, to [t, width] in the same dtype."""
    from .kernels.llama_rows import silu_mul_kernel

    require_dims("gate_up", gate_up, 2)
    require_inner("gate_up", gate_up)
    t, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(t, width, dtype=gate_up.dtype, device=gate_up.device)
    if t:
        block = min(1024, _power(width))
        silu_mul_kernel[(t, -(-width // block))](
            gate_up, gate_up.stride(0), out, out.stride(0), width, BLOCK=block, num_warps=4, **overlap(gate_up.device)
        )
    return out


def argmax(
    logits: torch.Tensor, *, flat: torch.Tensor | None = None, where: torch.Tensor | None = None
) -> torch.Tensor:
    """The lowest index of each row's maximum.

    Args:
        logits: [n, vocab], last dimension contiguous, vocab < 2^31.
        flat: int32 [any]; the results are written there too.
        where: int32 or int64 [n], place of each row's result in `flat`.

    Returns:
        int64 [n].
    """
    from .kernels.llama_rows import argmax_kernel

    require_dims("logits", logits, 2)
    require_inner("logits", logits)
    require((flat is None) == (where is None), "flat and where come together")
    require_same_device(logits, flat, where)
    n, vocab = logits.shape
    out = torch.empty(n, dtype=torch.int64, device=logits.device)
    if n:
        argmax_kernel[(n,)](
            logits,
            logits.stride(0),
            out,
            flat,
            where,
            vocab,
            HAS_TARGET=flat is not None,
            BLOCK=8192,
            num_warps=16,
            **overlap(logits.device),
        )
    return out
