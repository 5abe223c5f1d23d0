"""What steps with prompts derive on the device from where their rows begin, in shapes that a CUDA graph can keep."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .checks import require, require_dtype, require_inner, require_same_device
from .overlap import overlap

_TILE = 128


class Pieces(NamedTuple):
    """Rows in pieces. Pieces past the last one, and some between, are empty.

    Attributes:
        starts: int32 [n + 1], first token of each.
        lengths: int32 [n], positions of its sequence up to its last token.
        rows: int32 [n], the row that it is of.
    """

    starts: torch.Tensor
    lengths: torch.Tensor
    rows: torch.Tensor


def cut_rows(query_starts: torch.Tensor, seq_lens: torch.Tensor, *, first: int, length: int, tokens: int) -> Pieces:
    """Cut the tokens of ragged rows into pieces of one row each.

    Args:
        query_starts: int32 [R + 1], first token of each row.
        seq_lens: int32 [R], positions of each sequence; its tokens are the last ones.
        first: rows before it are left out; first < R.
        length: most tokens of a piece.
        tokens: upper bound of the rows' tokens.

    Returns:
        `tokens // length + R - first` pieces, in the order of the tokens.
    """
    from .kernels.ragged import cut_rows_kernel

    rows = seq_lens.shape[0] - first
    require(rows > 0 and first >= 0, lambda: f"first is {first}; there are {seq_lens.shape[0]} rows")
    require(length > 0, lambda: f"length is {length}; it must be positive")
    for name, tensor in {"query_starts": query_starts, "seq_lens": seq_lens}.items():
        require_dtype(name, tensor, torch.int32)
        require_inner(name, tensor)
    require_same_device(query_starts, seq_lens)
    n = tokens // length + rows
    starts = torch.empty(n + 1, dtype=torch.int32, device=query_starts.device)
    lengths, table_rows = torch.empty(2, n, dtype=torch.int32, device=query_starts.device)
    cut_rows_kernel[(n // _TILE + 1,)](
        query_starts, seq_lens, starts, lengths, table_rows, first, rows, length, n, rows.bit_length(),
        BT=_TILE, num_warps=4, **overlap(starts.device),
    )  # fmt: skip
    return Pieces(starts, lengths, table_rows)


def ragged_inputs(
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    slots: torch.Tensor,
    flat: torch.Tensor,
    widths: torch.Tensor,
    packed: torch.Tensor,
    layout: torch.Tensor,
    tables: torch.Tensor,
    *,
    tokens: int,
    capacity: int,
    scratch: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read the input ids of ragged rows, and put their block tables where a captured step reads them.

    Args:
        query_starts: int32 [R + 1], first token of each row, from 0.
        seq_lens: int32 [R], positions of each sequence; its tokens are the last ones.
        slots: int32 [R], each sequence's line of `flat`.
        flat: int32 [any], token ids, `capacity` a line.
        widths: int32 [groups], columns of each table that are given.
        packed: int32 [any], each table's [R, width], one after the other.
        layout: int32 [groups, 2], of each table: where it begins in `tables`, and its columns.
        tables: int32 [any]; what is given of the tables is written.
        tokens: T, at least all rows' tokens.
        capacity: of a line.
        scratch: a place in `flat` that belongs to nobody.

    Returns:
        Token ids int64 [T] and positions int64 [T]; of tokens past the last row: what is at `scratch`, and 0.
    """
    from .kernels.ragged import ragged_inputs_kernel

    given = {
        "query_starts": query_starts, "seq_lens": seq_lens, "slots": slots, "flat": flat, "widths": widths, "packed": packed,
        "layout": layout, "tables": tables,
    }  # fmt: skip
    for name, tensor in given.items():
        require_dtype(name, tensor, torch.int32)
        require_inner(name, tensor)
    require_same_device(*given.values())
    rows = seq_lens.shape[0]
    require(rows > 0 and tokens > 0, lambda: f"{rows} rows of {tokens} tokens; there must be some")
    token_ids, positions = torch.empty(2, tokens, dtype=torch.int64, device=flat.device)
    ragged_inputs_kernel[(rows + -(-tokens // _TILE),)](
        query_starts, seq_lens, slots, flat, capacity, scratch, widths, packed, layout, tables, token_ids, positions, rows,
        tokens, rows.bit_length(), GROUPS=layout.shape[0], BLOCK=_TILE, num_warps=4, **overlap(flat.device),
    )  # fmt: skip
    return token_ids, positions
