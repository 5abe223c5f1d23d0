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
_DENSE_FACTOR = 4  # prompt tiles attend densely (with a mask) up to this many times the selected entries


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
    return latent, ops.apply_rope(ops.rms_norm(kv, weights.kv_norm, config.rms_norm_eps), rotary)


def attention_output(attended: Tensor, weights: AttentionWeights, rotary: ops.RotaryTable) -> Tensor:
    """Undo the rotation and project: [T, heads, head_dim] to [T, d]."""
    straight = ops.apply_rope(attended, rotary, inverse=True)
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
    q = ops.apply_rope(q, rotary)
    out = torch.empty_like(q)
    for number, tile in enumerate(tiles):
        selection = compressed.selections[number] if compressed else None
        if compressed and selection and _gathers(tile, selection, config):
            result = _attend_gathered(q, weights, config, step, tile, window_pool, compressed, selection)
        else:
            result = _attend_dense(q, weights, config, step, tile, window_pool, compressed, selection)
        tile.put(out, result)
    return attention_output(out, weights, rotary)


def _gathers(tile: TileSet, selection: Selection, config: V41Config) -> bool:
    factor = 1 if tile.shape[1] == 1 else _DENSE_FACTOR
    return selection.mask.shape[-1] > factor * config.index_topk


def _attend_dense(
    q: Tensor,
    weights: AttentionWeights,
    config: V41Config,
    step: StepRows,
    tile: TileSet,
    window_pool: Tensor,
    compressed: CompressedKeys | None,
    selection: Selection | None,
) -> Tensor:
    """Every visible entry is a key; the selection is a mask."""
    b, m = tile.shape
    queries = tile.take(q)
    entries = _dense_entries(tile, step, config, compressed) if compressed else None
    width = tile.window_slots.shape[1] + (0 if entries is None else entries.shape[1])
    size = max(1, _MAX_SCORES // (width * max(m * config.num_attention_heads, config.head_dim)))
    parts = []
    for start in range(0, b, size):
        part = slice(start, start + size)
        keys = ops.kv_gather(window_pool, tile.window_slots[part], "fp8", config.head_dim, torch.float32)
        allowed = tile.window_allowed[part]
        if entries is not None and selection is not None:
            keys = torch.cat((entries[tile.owner[part]], keys), dim=1)
            allowed = torch.cat((selection.mask[part], allowed), dim=2)
        parts.append(ops.attend(queries[part], keys, allowed, weights.sink, config.attention_scale))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _dense_entries(tile: TileSet, step: StepRows, config: V41Config, compressed: CompressedKeys) -> Tensor:
    """[n, s, head_dim] of every sequence of the tile set, gathered once a step and source."""
    key = ("compressed", compressed.source)
    if key not in tile.memo:
        slots = tile.entry_slots(step, compressed.ratio)
        tile.memo[key] = ops.kv_gather(compressed.pool, slots, "nvfp4", config.head_dim, torch.float32)
    return tile.memo[key]


def _attend_gathered(
    q: Tensor,
    weights: AttentionWeights,
    config: V41Config,
    step: StepRows,
    tile: TileSet,
    window_pool: Tensor,
    compressed: CompressedKeys,
    selection: Selection,
) -> Tensor:
    """Each query reads its own selected entries."""
    b, m = tile.shape
    if "slots" not in selection.memo:
        index = ops.mask_to_indices(selection.mask.flatten(0, 1), config.index_topk).to(torch.int64)
        owner = tile.owner.repeat_interleave(m)
        slots = tile.entry_slots(step, compressed.ratio)[owner].gather(1, index.clamp_min(0))
        selection.memo["slots"] = slots.masked_fill(index < 0, -1)
    # Row i of a tile reads columns i .. i + W - 1 of the tile's window; what lies below the floor is -1 already.
    window = tile.window_slots[:, :-1].unfold(1, config.sliding_window, 1).flatten(0, 1)
    result = ops.sparse_mla_decode(
        tile.take(q).flatten(0, 1),
        window_pool,
        window,
        weights.sink,
        scale=config.attention_scale,
        compressed_pool=compressed.pool,
        compressed_slots=selection.memo["slots"],
    )
    return result.unflatten(0, (b, m))
