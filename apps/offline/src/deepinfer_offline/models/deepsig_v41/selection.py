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

_MAX_PRODUCTS = 1 << 24  # indexer products held at once, float32 elements


@dataclass(frozen=True)
class Selection:
    """The entries that the rows of one tile set attend.

    Attributes:
        mask: bool [b, m, s].
        candidates: bool [b, m, s], the candidate set in force, or None when it holds every visible entry.
        memo: what layers derive from the mask once.
    """

    mask: Tensor
    candidates: Tensor | None
    memo: dict[str, Tensor]


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
            chosen.append(Selection(columns < visible.unsqueeze(-1), None, {}))
            continue
        if queries is None or head_weights is None:
            queries, head_weights = _index_queries(config, weights, x, query_latent, rotary)
        keys = _index_keys(tile, step, layer, config, cache)
        chosen.append(_select(layer, config, tile, queries, head_weights, keys, visible, candidates))
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
    tile: TileSet,
    queries: Tensor,
    head_weights: Tensor,
    keys: Tensor,
    visible: Tensor,
    candidates: Tensor | None,
) -> Selection:
    b, m = tile.shape
    entries = keys.shape[1]
    mask = torch.empty(b, m, entries, dtype=torch.bool, device=keys.device)
    published = torch.empty_like(mask) if layer.publishes_candidates else candidates
    tiled_queries, tiled_weights = tile.take(queries), tile.take(head_weights)
    step = max(1, _MAX_PRODUCTS // (m * config.index_n_heads * entries))
    for start in range(0, b, step):
        part = slice(start, start + step)
        scores = ops.indexer_logits(
            tiled_queries[part].to(keys.dtype), tiled_weights[part].to(keys.dtype), keys[tile.owner[part]], visible[part]
        ).flatten(0, 1)
        if layer.publishes_candidates:
            assert published is not None
            published[part] = ops.candidate_mask(
                scores,
                visible[part].flatten(),
                blocks=config.candidate_topk_blocks,
                block_size=config.candidate_block_size,
            ).unflatten(0, (-1, m))
        elif candidates is not None:
            scores = scores.masked_fill(~candidates[part].flatten(0, 1), -torch.inf)
        mask[part] = ops.topk_mask(scores, config.index_topk).unflatten(0, (-1, m))
    return Selection(mask, published if layer.publishes_candidates or layer.uses_candidates else None, {})
