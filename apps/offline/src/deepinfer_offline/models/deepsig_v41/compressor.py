"""Writes the global entries of a KV source: compressed KV and index keys. `v41-model` section 2.4."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from deepinfer_offline.models.deepsig_v41.cache import V41Cache
from deepinfer_offline.models.deepsig_v41.config import V41Config
from deepinfer_offline.models.deepsig_v41.rows import StepRows
from deepinfer_offline.models.deepsig_v41.schedule import LayerPlan
from deepinfer_offline.models.deepsig_v41.weights import CompressorWeights
from deepinfer_offline.ops import deepsig as ops


@dataclass(frozen=True)
class EntryWrites:
    """Which entries a step completes for one ratio. g entries.

    Attributes:
        members: int64 [g, r], rows that make up each entry; numbers from T on count into the rings of the step's sequences.
        positions: int64 [g], position of each entry's first token.
        slots: int64 [g], where the entry goes.
        ring_rows: int64 [k], rows of the step whose value and gate are kept.
        ring_block: int64 [k], and the ring block and row that they go to.
        ring_row: int64 [k].
    """

    members: Tensor
    positions: Tensor
    slots: Tensor
    ring_rows: Tensor
    ring_block: Tensor
    ring_row: Tensor


def plan_writes(step: StepRows, ratio: int, ring: int) -> EntryWrites:
    """Find the groups of `ratio` tokens that end in this step and are not shared with others already.

    Args:
        step: the rows.
        ratio: tokens of a group.
        ring: rows of each sequence's ring; not read for ratio 1.
    """
    positions, owner = step.host_positions, step.owner
    closes = np.flatnonzero(((positions + 1) % ratio == 0) & (positions >= step.write_floors[owner]))
    back = np.arange(ratio - 1, -1, -1)
    member_positions = positions[closes][:, None] - back
    in_step = member_positions >= step.first[owner[closes]][:, None]
    rows = closes[:, None] - back
    if ratio > 1:
        in_ring = step.count + owner[closes][:, None] * ring + member_positions % ring
        rows = np.where(in_step, rows, in_ring)
        kept = np.flatnonzero(positions >= step.ends[owner] - ring)
    else:
        kept = np.zeros(0, np.int64)
    last, owners = step.tensor(positions[closes]), step.tensor(owner[closes])
    blocks = step.ring_blocks() if ratio > 1 else step.owners
    return EntryWrites(
        members=step.tensor(rows),
        positions=last - (ratio - 1),
        slots=step.entry_slots(owners, last, ratio),
        ring_rows=step.tensor(kept),
        ring_block=blocks[step.tensor(owner[kept])],
        ring_row=step.tensor(positions[kept] % max(ring, 1)),
    )


def write_entries(
    x: Tensor,
    step: StepRows,
    writes: EntryWrites,
    layer: LayerPlan,
    weights: CompressorWeights,
    config: V41Config,
    frequencies: Tensor,
    cache: V41Cache,
) -> None:
    """Project, pool and store the entries of `writes`, and keep the rows of open groups.

    Args:
        x: [T, d], the normalised input of the layer's attention, all rows of the step.
        step: the rows of x.
        writes: from `plan_writes` for this layer's ratio.
        layer: a KV source.
        weights: of its compressor.
        config: of the model.
        frequencies: rotary frequencies of compressed layers.
        cache: written in place.
    """
    if layer.ratio == 1:
        latent = functional.linear(x, weights.wkv)[writes.members[:, 0]]
    else:
        latent = _pool(x, step, writes, weights, cache.rings[layer.index]).to(x.dtype)
    latent = ops.rms_norm(latent, weights.norm, config.rms_norm_eps)
    table = ops.rotary_table(writes.positions, frequencies)
    ops.kv_insert(cache.compressed[layer.index], writes.slots, ops.apply_rope(latent, table), "nvfp4")
    keys = ops.rms_norm(functional.linear(latent, weights.wk), weights.k_norm, config.rms_norm_eps)
    ops.kv_insert(cache.index_keys[layer.index], writes.slots, ops.apply_rope(keys, table), "mxfp4")


def _pool(x: Tensor, step: StepRows, writes: EntryWrites, weights: CompressorWeights, ring: Tensor) -> Tensor:
    """float32 [g, head_dim], the pooled groups; updates the ring."""
    assert weights.wgate is not None
    wide = x.float()
    rows = torch.cat((functional.linear(wide, weights.wkv), functional.linear(wide, weights.wgate)), dim=-1)
    # The groups are pooled before the ring changes: a group that began in an earlier step reads its rows from there.
    earlier = ring[step.ring_blocks()].flatten(0, 1)
    members = torch.cat((rows, earlier))[writes.members]
    ring[writes.ring_block, writes.ring_row] = rows[writes.ring_rows]
    values, gates = members.chunk(2, dim=-1)
    return ops.compress(values, gates)
