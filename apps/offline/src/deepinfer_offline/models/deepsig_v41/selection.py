"""Which compressed entries a query attends: the indexer, the candidate set, and what Reuse layers take over."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer_offline.models.deepsig_v41.cache import V41Cache
from deepinfer_offline.models.deepsig_v41.config import V41Config
from deepinfer_offline.models.deepsig_v41.rows import StepRows
from deepinfer_offline.models.deepsig_v41.schedule import LayerPlan
from deepinfer_offline.models.deepsig_v41.tiles import TileSet
from deepinfer_offline.models.deepsig_v41.weights import IndexerWeights
from deepinfer_offline.ops import deepsig as ops

_MAX_PRODUCTS = 1 << 22  # indexer products held at once, float32 elements: 16 MiB
_DENSE_FACTOR = 4  # prompt tiles attend with a mask over all entries up to this many times the selected ones


@dataclass(frozen=True)
class Selection:
    """The entries that the rows of one tile set attend: as a mask over all entries, or as the slots of each row's own.

    Attributes:
        mask: bool [b, m, s], or None when every entry is attended by every row (`slots` is None) or `slots` is used.
        slots: int64 [b * m, k] in the source's pools, -1 = absent; or None.
        candidates: bool [b, m, s], the candidate set in force, or None when it holds every visible entry.
        memo: keys gathered by `slots`, shared by the layers that reuse the selection.
    """

    mask: Tensor | None
    slots: Tensor | None
    candidates: Tensor | None
    memo: dict[str, Tensor]


def _gathers(tile: TileSet, entries: int, config: V41Config) -> bool:
    """Whether each row reads its own entries, instead of all rows of a tile reading all entries under a mask."""
    factor = 1 if tile.shape[1] == 1 else _DENSE_FACTOR
    return entries > factor * config.index_topk


def _must_score(layer: LayerPlan, config: V41Config, entries: int, candidates: Tensor | None) -> bool:
    """Whether scores can matter: with few entries everything visible is selected and is a candidate."""
    if entries > config.index_topk:
        return True
    if layer.publishes_candidates:
        return -(-entries // config.candidate_block_size) > config.candidate_topk_blocks
    return layer.uses_candidates and candidates is not None


def select_entries(
    layer: LayerPlan,
    config: V41Config,
    weights: IndexerWeights,
    step: StepRows,
    tiles: list[TileSet],
    x: Tensor,
    query_latent: Tensor,
    rotary: ops.RotaryTable,
    cache: V41Cache,
    previous: list[Selection] | None,
) -> list[Selection]:
    """Run the indexer of a Full or Reindex layer.

    Args:
        layer: the index source.
        config: of the model.
        weights: of its indexer.
        step: the rows.
        tiles: of the rows.
        x: [T, d], normalised input of the layer's attention.
        query_latent: [T, q_lora].
        rotary: of the rows' positions.
        cache: holds the source's index keys, this step's included.
        previous: the selection that this one replaces; its candidates stay in force.

    Returns:
        one selection a tile set.
    """
    carried = [s.candidates for s in previous] if previous and layer.uses_candidates else [None] * len(tiles)
    queries: Tensor | None = None
    head_weights: Tensor | None = None
    chosen = []
    for tile, candidates in zip(tiles, carried, strict=True):
        entries = tile.entries(layer.ratio)
        columns = torch.arange(entries, device=x.device)
        visible = tile.visible(layer.ratio)
        if not _must_score(layer, config, entries, candidates):
            mask = columns < visible.unsqueeze(-1)
            chosen.append(Selection(None if bool(mask.all()) else mask, None, None, {}))
            continue
        if queries is None or head_weights is None:
            queries, head_weights = _index_queries(config, weights, x, query_latent, rotary)
        keys = _index_keys(tile, step, layer, config, cache)
        chosen.append(_select(layer, config, step, tile, queries, head_weights, keys, visible, candidates))
    return chosen


def _index_queries(
    config: V41Config, weights: IndexerWeights, x: Tensor, query_latent: Tensor, rotary: ops.RotaryTable
) -> tuple[Tensor, Tensor]:
    heads, dim = config.index_n_heads, config.index_head_dim
    queries = functional.linear(query_latent, weights.wq_b).unflatten(-1, (heads, dim))
    queries = ops.round_to_record(ops.apply_rope(queries, rotary), "mxfp4")
    return queries, functional.linear(x, weights.weights_proj) * (dim**-0.5 * heads**-0.5)


def _index_keys(tile: TileSet, step: StepRows, layer: LayerPlan, config: V41Config, cache: V41Cache) -> Tensor:
    """[n, s, index_head_dim] of every sequence of the tile set, gathered once a step and source."""
    key = ("index keys", layer.source)
    if key not in tile.memo:
        slots = tile.entry_slots(step, layer.ratio)
        pool = cache.index_keys[layer.source]
        tile.memo[key] = ops.kv_gather(pool, slots, "mxfp4", config.index_head_dim, torch.float32)
    return tile.memo[key]


def _select(
    layer: LayerPlan,
    config: V41Config,
    step: StepRows,
    tile: TileSet,
    queries: Tensor,
    head_weights: Tensor,
    keys: Tensor,
    visible: Tensor,
    candidates: Tensor | None,
) -> Selection:
    """Score and select slab by slab, so that the products of many heads never exist for all rows at once."""
    b, m = tile.shape
    entries = keys.shape[1]
    gathers = _gathers(tile, entries, config)
    pick = ops.topk_lowest_index if gathers else ops.topk_mask
    publishes = layer.publishes_candidates and -(-entries // config.candidate_block_size) > config.candidate_topk_blocks
    picked, published = [], []
    tiled_queries, tiled_weights = tile.take(queries).to(keys.dtype), tile.take(head_weights).to(keys.dtype)
    size = max(1, _MAX_PRODUCTS // (m * config.index_n_heads * entries))
    for start in range(0, b, size):
        part = slice(start, start + size)
        own = keys[part] if tile.single and len(keys) == b else keys[tile.owner[part]]
        scores = ops.indexer_logits(tiled_queries[part], tiled_weights[part], own, visible[part]).flatten(0, 1)
        if publishes:
            published.append(_candidates(scores, visible[part], config))
        elif candidates is not None:
            scores = scores.masked_fill_(~candidates[part].flatten(0, 1), -torch.inf)
        picked.append(pick(scores, config.index_topk))
    force = torch.cat(published).view(b, m, entries) if publishes else candidates
    chosen = picked[0] if len(picked) == 1 else torch.cat(picked)
    if gathers:
        return Selection(None, _entry_slots(tile, step, layer, chosen), force, {})
    return Selection(chosen.view(b, m, entries), None, force, {})


def _candidates(scores: Tensor, visible: Tensor, config: V41Config) -> Tensor:
    return ops.candidate_mask(
        scores, visible.flatten(), blocks=config.candidate_topk_blocks, block_size=config.candidate_block_size
    )


def _entry_slots(tile: TileSet, step: StepRows, layer: LayerPlan, chosen: Tensor) -> Tensor:
    """Slots int64 [b * m, k] of the entries numbered `chosen` int32 [b * m, k], -1 where absent."""
    index = chosen.to(torch.int64)
    table = tile.entry_slots(step, layer.ratio)
    owner = tile.owner if tile.single else tile.owner.repeat_interleave(tile.shape[1])
    own = table if tile.single and len(table) == len(index) else table[owner]
    return own.gather(1, index.clamp_min(0)).masked_fill_(index < 0, -1)
