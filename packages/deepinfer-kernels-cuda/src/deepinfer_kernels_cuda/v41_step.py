"""A V4.1 step's own indices, made on the device from positions and block tables: no shape depends on the data."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .checks import require, require_dims, require_dtype, require_inner, require_same_device
from .overlap import overlap


class WindowIndex(NamedTuple):
    """own int64 [T], the slot of each token; keys int32 [T, window], oldest first, -1 = absent."""

    own: torch.Tensor
    keys: torch.Tensor


class EntryIndex(NamedTuple):
    """slots int64 [T], where the entry goes that a token completes, -1 = none; visible int32 [T], entries it may see."""

    slots: torch.Tensor
    visible: torch.Tensor


def _power(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def window_index(
    positions: torch.Tensor, owners: torch.Tensor, floors: torch.Tensor, table: torch.Tensor, *, window: int, block: int
) -> WindowIndex:
    """Slots of each token's window.

    Args:
        positions: int64 [T].
        owners: int32 [T], row of the block table.
        floors: int32 [R], lowest position that may be read.
        table: int32 [R, columns], block table of the window group, last dimension contiguous.
        window: keys of a query, itself included.
        block: positions of a block.
    """
    from .kernels.v41_step import window_index_kernel

    require_inner("table", table)
    require_same_device(positions, owners, floors, table)
    t = positions.shape[0]
    own = torch.empty(t, dtype=torch.int64, device=table.device)
    keys = torch.empty(t, window, dtype=torch.int32, device=table.device)
    if t:
        window_index_kernel[(t,)](
            positions, owners, floors, table, table.stride(0), own, keys, window, BLOCK=block, W=_power(window),
            num_warps=1, **overlap(table.device),
        )  # fmt: skip
    return WindowIndex(own, keys)


def entry_index(
    positions: torch.Tensor,
    owners: torch.Tensor,
    write_floors: torch.Tensor,
    table: torch.Tensor,
    *,
    ratio: int,
    block: int,
) -> EntryIndex:
    """Entries that tokens complete, and how many they see.

    Args:
        positions: int64 [T].
        owners: int32 [T].
        write_floors: int32 [R]; an entry whose last position is below is not written.
        table: int32 [R, columns], block table of the entries' group.
        ratio: tokens of an entry.
        block: positions of a block, which holds ceil(block / ratio) entries.
    """
    from .kernels.v41_step import entry_slots_kernel

    require_inner("table", table)
    require_same_device(positions, owners, write_floors, table)
    t = positions.shape[0]
    slots = torch.empty(t, dtype=torch.int64, device=table.device)
    visible = torch.empty(t, dtype=torch.int32, device=table.device)
    if t:
        entry_slots_kernel[(-(-t // 128),)](
            positions, owners, write_floors, table, table.stride(0), slots, visible, t, BLOCK=block, RATIO=ratio,
            ENTRIES=-(-block // ratio), BT=128, num_warps=4, **overlap(table.device),
        )  # fmt: skip
    return EntryIndex(slots, visible)


def selected_slots(
    chosen: torch.Tensor, owners: torch.Tensor, table: torch.Tensor, *, ratio: int, block: int
) -> torch.Tensor:
    """Slots of chosen entries, in place of their numbers.

    Args:
        chosen: int32 [T, k] entry numbers, -1 = absent; contiguous, overwritten and returned.
        owners: int32 [T].
        table: int32 [R, columns].
        ratio: tokens of an entry.
        block: positions of a block.
    """
    from .kernels.v41_step import selected_slots_kernel

    require_dims("chosen", chosen, 2)
    require_dtype("chosen", chosen, torch.int32)
    require(chosen.is_contiguous(), f"chosen has strides {chosen.stride()}; it must be contiguous")
    require_inner("table", table)
    require_same_device(chosen, owners, table)
    t, k = chosen.shape
    if t and k:
        tile = min(512, _power(k))
        selected_slots_kernel[(t, -(-k // tile))](
            chosen, owners, table, table.stride(0), k, BLOCK=block, RATIO=ratio, ENTRIES=-(-block // ratio), KB=tile,
            num_warps=2, **overlap(chosen.device),
        )  # fmt: skip
    return chosen


def pool_groups(
    rows: torch.Tensor,
    positions: torch.Tensor,
    owners: torch.Tensor,
    firsts: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    ring: torch.Tensor,
    ring_blocks: torch.Tensor,
    *,
    ratio: int,
) -> torch.Tensor:
    """Pool the groups that a step completes, each channel with its own softmax, and keep the chunks' last rows in the rings.

    Args:
        rows: float32 [T, 2 * n], values and gates; a sequence's rows follow one another.
        positions: int64 [T].
        owners: int32 [T].
        firsts: int32 [R], position of each sequence's first row here; earlier ones are read from its ring.
        ends: int32 [R], one past each sequence's last position.
        slots: int64 [T], negative where a token completes no group (its result is zeros).
        ring: float32 [blocks, rows, 2 * n], row = position % rows; written in place.
        ring_blocks: int32 [R], each sequence's block.
        ratio: tokens of a group.

    Returns:
        float32 [T, n].
    """
    from .kernels.v41_step import keep_rows_kernel, pool_groups_kernel

    require_dims("rows", rows, 2)
    require_dims("ring", ring, 3)
    require_dtype("rows", rows, torch.float32)
    require_dtype("ring", ring, torch.float32)
    require_inner("rows", rows)
    require_inner("ring", ring)
    require(ring.shape[2] == rows.shape[1], f"ring rows have {ring.shape[2]} channels; rows have {rows.shape[1]}")
    require(ring.shape[1] >= ratio, f"a ring of {ring.shape[1]} rows cannot hold a group of {ratio}")
    require_same_device(rows, positions, owners, firsts, ends, slots, ring, ring_blocks)
    t, width = rows.shape[0], rows.shape[1] // 2
    out = torch.empty(t, width, dtype=torch.float32, device=rows.device)
    if t:
        where = (ring, ring.stride(0), ring.stride(1), ring_blocks)
        pool_groups_kernel[(t,)](
            rows, rows.stride(0), positions, owners, firsts, slots, *where, out, width, ring.shape[1], RATIO=ratio,
            D=_power(width), num_warps=4, **overlap(rows.device),
        )  # fmt: skip
        keep_rows_kernel[(t,)](
            rows, rows.stride(0), positions, owners, ends, *where, 2 * width, ring.shape[1], D=_power(2 * width),
            num_warps=4, **overlap(rows.device),
        )  # fmt: skip
    return out


def clamped_swiglu(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    """`silu(min(gate, limit)) * clip(up, -limit, limit)`: [t, 2m], gate first, to [t, m], same dtype, rounded once."""
    from .kernels.v41_step import clamped_swiglu_rows_kernel

    require_dims("gate_up", gate_up, 2)
    require_inner("gate_up", gate_up)
    t, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(t, width, dtype=gate_up.dtype, device=gate_up.device)
    if t:
        block = min(1024, _power(width))
        clamped_swiglu_rows_kernel[(t, -(-width // block))](
            gate_up,
            gate_up.stride(0),
            out,
            width,
            float(limit),
            BLOCK=block,
            num_warps=4,
            **overlap(gate_up.device),
        )
    return out


def rotation(
    positions: torch.Tensor, frequencies: torch.Tensor, *, shift: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of `max(position - shift, 0)` times each frequency.

    Args:
        positions: int64 [T].
        frequencies: float32 [pairs].
        shift: subtracted first.

    Returns:
        Two float32 [T, pairs].
    """
    from .kernels.v41_step import rotation_kernel

    require_same_device(positions, frequencies)
    t, pairs = positions.shape[0], frequencies.shape[0]
    both = torch.empty(2, t, pairs, dtype=torch.float32, device=positions.device)
    if t:
        rotation_kernel[(t,)](
            positions,
            frequencies,
            both[0],
            both[1],
            pairs,
            shift,
            P=_power(pairs),
            num_warps=1,
            **overlap(positions.device),
        )
    return both[0], both[1]


class StepInputs(NamedTuple):
    """token_ids and positions int64 [rows]; header int32 [3, rows]: slots, lengths, targets."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    header: torch.Tensor


def step_inputs(
    packed: torch.Tensor, flat: torch.Tensor, tables: torch.Tensor, layout: torch.Tensor, *, rows: int, scratch: int
) -> StepInputs:
    """Unpack what the host knows of a decode step, so that one copy brings all of it.

    Args:
        packed: int32 [any]: the number of live rows n <= rows, the width of each table, then slots [n], lengths [n], places of
            the input ids in `flat` [n], places of what is drawn [n], and each table's [n, width].
        flat: int32 [any], token ids.
        tables: int32 [any], all tables; what is given of them is written, zeros for rows that pad.
        layout: int32 [groups, 2], of each table: where it begins in `tables`, and its columns.
        rows: of the result; those from n on pad: slot 0, length 1, input and output at `scratch`.
        scratch: a place in `flat` that belongs to nobody.
    """
    from .kernels.v41_step import step_inputs_kernel

    for name, tensor in {"packed": packed, "flat": flat, "tables": tables, "layout": layout}.items():
        require_dtype(name, tensor, torch.int32)
    require_same_device(packed, flat, tables, layout)
    both = torch.empty(2, rows, dtype=torch.int64, device=packed.device)
    header = torch.empty(3, rows, dtype=torch.int32, device=packed.device)
    if rows:
        step_inputs_kernel[(rows,)](
            packed, flat, layout, header, tables, both[0], both[1], rows, scratch, GROUPS=layout.shape[0], BLOCK=128,
            num_warps=1, **overlap(packed.device),
        )  # fmt: skip
    return StepInputs(both[0], both[1], header)
