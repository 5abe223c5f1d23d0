"""One attention layer: projections, window write, attention over window and selected entries, grouped output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer_offline.models.deepsig_v41.config import V41Config
from deepinfer_offline.models.deepsig_v41.rows import StepRows
from deepinfer_offline.models.deepsig_v41.selection import Selection
from deepinfer_offline.models.deepsig_v41.tiles import TileSet
from deepinfer_offline.models.deepsig_v41.weights import AttentionWeights
from deepinfer_offline.ops import deepsig as ops

_MAX_SCORES = 1 << 23  # attention scores held at once, float32 elements
_MAX_KEPT = 1 << 24  # gathered keys kept for the layers that reuse a selection, float32 elements


@dataclass(frozen=True)
class CompressedKeys:
    """What a layer with ratio above 0 attends beside its window.

    Attributes:
        pool: uint8 [slots, record], the source's compressed KV.
        source: the layer that owns it.
        ratio: tokens of an entry.
        selections: one a tile set.
    """

    pool: Tensor
    source: int
    ratio: int
    selections: list[Selection]


def project_latents(
    x: Tensor, weights: AttentionWeights, config: V41Config, rotary: ops.RotaryTable
) -> tuple[Tensor, Tensor]:
    """The query latent [T, q_lora] and the window KV [T, head_dim], rotated but not yet rounded."""
    both = functional.linear(x, weights.wqkv_a)
    latent, kv = both.split((config.q_lora_rank, config.head_dim), dim=-1)
    latent = ops.rms_norm(latent, weights.q_norm, config.rms_norm_eps)
    return latent, ops.apply_rope(ops.rms_norm(kv, weights.kv_norm, config.rms_norm_eps), rotary, inplace=True)


def attention_output(attended: Tensor, weights: AttentionWeights, rotary: ops.RotaryTable) -> Tensor:
    """Undo the rotation and project: [T, heads, head_dim] to [T, d]."""
    straight = ops.apply_rope(attended, rotary, inverse=True, inplace=True)
    groups, rank, width = weights.wo_a.shape
    grouped = straight.reshape(-1, groups, width).transpose(0, 1)
    low = torch.bmm(grouped, weights.wo_a.transpose(1, 2)).transpose(0, 1).reshape(-1, groups * rank)
    return functional.linear(low, weights.wo_b)


def attend_rows(
    query_latent: Tensor,
    weights: AttentionWeights,
    config: V41Config,
    step: StepRows,
    tiles: list[TileSet],
    rotary: ops.RotaryTable,
    window_pool: Tensor,
    compressed: CompressedKeys | None,
) -> Tensor:
    """Attention of all rows of a step.

    Args:
        query_latent: [T, q_lora].
        weights: of the layer.
        config: of the model.
        step: the rows.
        tiles: of the rows.
        rotary: of the rows' positions.
        window_pool: the layer's window KV, this step's included.
        compressed: None for a window-only layer.

    Returns:
        [T, d].
    """
    q = functional.linear(query_latent, weights.wq_b).unflatten(-1, (config.num_attention_heads, config.head_dim))
    q = ops.apply_rope(q, rotary, inplace=True)
    out = torch.empty_like(q)
    for number, tile in enumerate(tiles):
        selection = compressed.selections[number] if compressed else None
        if compressed and selection and selection.slots is not None and not _keeps(tile, selection, config):
            result = _attend_sparse(q, weights, config, tile, window_pool, compressed.pool, selection.slots)
        else:
            result = _attend_tiles(q, weights, config, step, tile, window_pool, compressed, selection)
        if tile.whole:
            out = result.squeeze(1)
        else:
            tile.put(out, result)
    return attention_output(out, weights, rotary)


def _keeps(tile: TileSet, selection: Selection, config: V41Config) -> bool:
    """Whether the selected entries are gathered once and kept, decoded, for the layers that reuse the selection."""
    assert selection.slots is not None
    return tile.shape[1] == 1 and selection.slots.numel() * config.head_dim <= _MAX_KEPT


def _attend_tiles(
    q: Tensor,
    weights: AttentionWeights,
    config: V41Config,
    step: StepRows,
    tile: TileSet,
    window_pool: Tensor,
    compressed: CompressedKeys | None,
    selection: Selection | None,
) -> Tensor:
    """Dense attention of each tile over its entries and its window, under a mask where one is needed."""
    b, m = tile.shape
    queries = tile.take(q)
    entries, visible, by_tile = None, None, False
    if compressed and selection:
        entries, visible = _entries(tile, step, config, compressed, selection)
        by_tile = selection.slots is not None or tile.single
    allowed = _joined_mask(tile, entries, visible)
    width = tile.window_slots.shape[1] + (0 if entries is None else entries.shape[1])
    size = max(1, _MAX_SCORES // (width * max(m * config.num_attention_heads, config.head_dim)))
    parts = []
    for start in range(0, b, size):
        part = slice(start, start + size)
        keys = ops.kv_gather(window_pool, tile.window_slots[part], "fp8", config.head_dim, torch.float32)
        if entries is not None:
            keys = torch.cat((entries[part] if by_tile else entries[tile.owner[part]], keys), dim=1)
        mask = None if allowed is None else allowed[part]
        parts.append(ops.attend(queries[part], keys, mask, weights.sink, config.attention_scale))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _joined_mask(tile: TileSet, entries: Tensor | None, visible: Tensor | None) -> Tensor | None:
    """Entries and window side by side, bool [b, m, s + m + W]; None when everything is allowed."""
    if visible is None and tile.window_full:
        return None
    if entries is None:
        return tile.window_allowed
    b, m = tile.shape
    if visible is None:
        visible = torch.ones(b, m, entries.shape[1], dtype=torch.bool, device=entries.device)
    return torch.cat((visible, tile.window_allowed), dim=2)


def _entries(
    tile: TileSet, step: StepRows, config: V41Config, compressed: CompressedKeys, selection: Selection
) -> tuple[Tensor, Tensor | None]:
    """Decoded compressed keys and which of them each row attends (None = all).

    Keys [b, k, head_dim] of each tile's own selection, or [n, s, head_dim] of every sequence's entries.
    """

    def gather(slots: Tensor) -> Tensor:
        return ops.kv_gather(compressed.pool, slots, "nvfp4", config.head_dim, torch.float32)

    if selection.slots is None:
        key = ("compressed", compressed.source)
        if key not in tile.memo:
            tile.memo[key] = gather(tile.entry_slots(step, compressed.ratio))
        return tile.memo[key], selection.mask
    memo = selection.memo
    if "keys" not in memo:
        memo["keys"] = gather(selection.slots)
        if bool((selection.slots < 0).any()):
            memo["visible"] = (selection.slots >= 0).unsqueeze(1)
    return memo["keys"], memo.get("visible")


def _attend_sparse(
    q: Tensor,
    weights: AttentionWeights,
    config: V41Config,
    tile: TileSet,
    window_pool: Tensor,
    compressed_pool: Tensor,
    slots: Tensor,
) -> Tensor:
    """Each query reads its own entries and window from the pools."""
    # Row i of a tile reads columns i .. i + W - 1 of the tile's window; what lies below the floor is -1 already.
    window = tile.window_slots[:, :-1].unfold(1, config.sliding_window, 1).flatten(0, 1)
    result = ops.sparse_mla_decode(
        tile.take(q).flatten(0, 1),
        window_pool,
        window,
        weights.sink,
        scale=config.attention_scale,
        compressed_pool=compressed_pool,
        compressed_slots=slots,
    )
    return result.unflatten(0, tile.shape)
