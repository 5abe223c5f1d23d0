"""A DSpark draft beside a Llama-family target: its context lies in the target's own KV blocks, under the same numbers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import torch
from deepinfer_specdec.dspark import DSparkConfig, DSparkModel, load_draft
from deepinfer_specdec.errors import CheckpointError

from deepinfer_offline.engine.base import EngineStartError
from deepinfer_offline.models.base import DraftChooser, DraftedBlocks, ForwardBatch, ModelOptions
from deepinfer_offline.models.llama.config import LlamaConfig
from deepinfer_offline.ops.attention.base import GROUP
from deepinfer_offline.ops.cpu.memory import cache_zeros

_MAX_GATHERED = 1 << 25  # values of a draft layer's context that are gathered at once

Pools = tuple[torch.Tensor, ...]
"""By draft layer: [blocks, block_size, 2, kv_heads, head_dim], keys and values of the injected context."""


class LlamaDraft:
    """Writes the context of every computed position, and drafts from it.

    Args:
        model: the draft, on the target's device and in its dtype.
        block_size: positions of a block of the target's KV group.
    """

    def __init__(self, model: DSparkModel, block_size: int) -> None:
        self.config = model.config
        self.taps = frozenset(model.config.taps)
        self._model = model
        self._block_size = block_size

    @classmethod
    def load(cls, folder: Path, config: LlamaConfig, options: ModelOptions) -> LlamaDraft:
        """Read a draft folder. Raises EngineStartError when it is not a draft, or not one for this target."""
        draft_config(folder, config)
        try:
            model = load_draft(folder, options.dtype, options.device)
        except CheckpointError as error:
            raise EngineStartError(f"--draft-model {folder}: {error}") from error
        return cls(model.requires_grad_(False), options.block_size)

    @property
    def digest(self) -> str:
        """Eight hex digits of the weights that make the context: contexts of other drafts must not be read."""
        weights = self._model.fc.weight.detach().float().cpu().numpy().tobytes()
        return hashlib.blake2b(weights, digest_size=4).hexdigest()

    def allocate(self, num_blocks: int) -> Pools:
        """Pools of zeros."""
        c, weight = self.config, self._model.fc.weight
        size = (num_blocks, self._block_size, 2, c.num_kv_heads, c.head_dim)
        return tuple(cache_zeros(size, weight.dtype, weight.device) for _ in range(c.num_layers))

    def write_context(self, features: torch.Tensor, batch: ForwardBatch, pools: Pools) -> None:
        """Store the context of every token of a step.

        Args:
            features: [T, taps * hidden], outputs of the tapped layers; changed.
            batch: the step. Positions below a row's write floor are left alone: others share them. So is everything of tokens
                behind the last row, which captured steps have.
            pools: from `allocate`; written in place.
        """
        places, owned = self._places(batch)
        # What nobody's tokens hold may be no number at all, and block 0 is read where nothing is seen: it must be one.
        features.masked_fill_(~owned[:, None], 0)
        for pool, (keys, values) in zip(pools, self._model.context(features[None], batch.positions[None]), strict=True):
            both = torch.stack((keys[0].transpose(0, 1), values[0].transpose(0, 1)), dim=1)
            pool.flatten(0, 1).index_copy_(0, places, both)

    def parallel(
        self,
        anchors: torch.Tensor,
        positions: torch.Tensor,
        tables: torch.Tensor,
        pools: Pools,
        embedding: torch.Tensor,
        longest: int,
    ) -> torch.Tensor:
        """Hidden states of the blocks, [R, K, hidden].

        Args:
            anchors, positions, tables, longest: see `DraftsBlocks.draft_blocks`.
            pools: from `allocate`.
            embedding: the target's, [vocab, hidden].
        """
        size = self._slab(longest)
        parts = [slice(start, start + size) for start in range(0, len(anchors), size)]
        return torch.cat([self._block(anchors[p], positions[p], tables[p], pools, embedding, longest) for p in parts])

    def sequential(
        self, base: Iterable[torch.Tensor], hidden: torch.Tensor, anchors: torch.Tensor, choose: DraftChooser
    ) -> DraftedBlocks:
        """See `CapturesBlocks.finish_blocks`; `base`: the target's logits of the states, [R, vocab] for each column."""
        return DraftedBlocks(*self._model.sequential(base, hidden, anchors, choose))

    def _block(
        self,
        anchors: torch.Tensor,
        positions: torch.Tensor,
        tables: torch.Tensor,
        pools: Pools,
        embedding: torch.Tensor,
        longest: int,
    ) -> torch.Tensor:
        """Hidden states of the parallel stage, [r, K, hidden]."""
        rows, width = len(anchors), self.config.block_size
        blocks, visible = self._visible(positions, tables, longest)
        own = visible.new_ones(rows, width)
        mask = torch.cat((visible, own), dim=1).unsqueeze(1).expand(-1, width, -1)

        def context(pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            found = pool.index_select(0, blocks.flatten()).view(rows, -1, *pool.shape[2:])
            return found[:, :, 0].transpose(1, 2), found[:, :, 1].transpose(1, 2)

        return self._model.block(anchors[:, None], positions[:, None], map(context, pools), embedding, mask)

    def _slab(self, longest: int) -> int:
        """Rows whose context of one layer is gathered at once."""
        return max(1, _MAX_GATHERED // _context_values(self.config, longest, self._block_size))

    def _places(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [T], where each token's context goes in the flattened pools: to block 0, which is nobody's, below a write floor
        and of tokens that no row has. And bool [T], which tokens a row has.

        Computed on the device: a captured step has no host tables.
        """
        positions, size, last = batch.positions, self._block_size, len(batch.seq_lens) - 1
        tokens = torch.arange(len(positions), device=positions.device, dtype=torch.int32)
        rows = torch.searchsorted(batch.query_starts[1:], tokens, right=True)
        owned, rows = rows <= last, rows.clamp_max(last)
        places = batch.block_tables[GROUP][rows, positions // size].long() * size + positions % size
        return torch.where(owned & (positions >= batch.write_floors[rows]), places, positions % size), owned

    def _visible(
        self, positions: torch.Tensor, tables: torch.Tensor, longest: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks [R, n] to read, and bool [R, n * block_size] of the positions that a block attends to."""
        size, window = self._block_size, self.config.window
        columns = torch.arange(-(-longest // size), device=positions.device).expand(len(positions), -1)
        if window and window + size < longest:
            first = (positions - window).clamp_min(0) // size
            columns = first[:, None] + torch.arange(-(-window // size) + 1, device=positions.device)
        places = columns[..., None] * size + torch.arange(size, device=positions.device)
        visible = places < positions[:, None, None]
        if window:
            visible &= places >= positions[:, None, None] - window
        return tables.gather(1, columns.clamp_max(tables.shape[1] - 1)), visible.flatten(1)


def draft_config(folder: Path, config: LlamaConfig) -> DSparkConfig:
    """The draft's configuration, checked against the target's. Raises EngineStartError naming what does not fit."""
    try:
        found = DSparkConfig.from_dict(json.loads((folder / "config.json").read_text()))
    except (OSError, ValueError) as error:
        raise EngineStartError(f"--draft-model {folder}: no readable draft configuration: {error}") from error
    wanted = {
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_target_layers": config.num_layers,
    }
    for name, value in wanted.items():
        if getattr(found, name) != value:
            raise EngineStartError(
                f"--draft-model {folder}: it was made for a target with {name} {getattr(found, name)}; this one's is {value}"
            )
    return found


def draft_block_bytes(config: DSparkConfig, options: ModelOptions) -> int:
    """Bytes that the draft's context adds to a KV block."""
    row = 2 * config.num_kv_heads * config.head_dim * options.dtype.itemsize
    return config.num_layers * options.block_size * row


def draft_context_bytes(config: DSparkConfig, options: ModelOptions) -> tuple[int, int]:
    """Bytes of a token that are kept for its context while the target's layers run; and those that writing it takes, the same
    among them, rounded up.
    """
    size, features = options.dtype.itemsize, len(config.taps) * config.hidden_size
    layer = 2 * config.num_kv_heads * config.head_dim
    # Features apart and together; injected states and their norm in float32; keys and values, rotated in float32.
    writing = 2 * features * size + config.hidden_size * (2 * size + 3 * 4)
    return features * size, writing + config.num_layers * layer * size + layer * (size + 8)


def draft_stage_bytes(config: DSparkConfig, options: ModelOptions) -> int:
    """Bytes that the parallel stage takes at most: a layer's context of a slab, gathered and again beside the block's own."""
    row = _context_values(config, options.max_model_len, options.block_size)
    return 3 * options.dtype.itemsize * max(row, min(_MAX_GATHERED, options.max_running * row))


def _context_values(config: DSparkConfig, longest: int, block_size: int) -> int:
    """Values of a draft layer's context that a row of `longest` positions gathers, rounded up."""
    positions = min(longest, config.window or longest) + 2 * block_size
    return 2 * positions * config.num_kv_heads * config.head_dim


def draft_weight_bytes(config: DSparkConfig, options: ModelOptions) -> int:
    """Bytes of the draft's weights."""
    with torch.device("meta"):
        model = DSparkModel(config)
    return sum(weight.numel() for weight in model.parameters()) * options.dtype.itemsize
