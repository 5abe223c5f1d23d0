"""The toy model with a block draft, for the loop that verifies drafts ahead of the host.

The draft knows the model's own distribution and is misled at some places, which a hash of the text chooses: rows accept none,
some or all of a block. Its context is what `forward` left in the cache, read through the block tables it is given.
"""

from dataclasses import replace
from typing import Any

import torch
from deepinfer_offline.engine.native.drafting import make_speculation
from deepinfer_offline.engine.native.engine import NativeEngine
from deepinfer_offline.engine.options import EngineOptions
from deepinfer_offline.models.base import DraftChooser, DraftedBlocks, ForwardBatch
from toy_engine import BLOCK, PRIME, VOCAB, ToyModel, make_engine, toy_logits

WIDTH = 5


def hash_step(value: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """`toy_engine.prefix_hash`, one token further."""
    return (value * 31_337 + tokens + 1) % PRIME


class DraftingToy(ToyModel):
    """See the module's docstring."""

    draft_group = "kv"
    draft_width = WIDTH

    def start_drafting(self) -> None:
        """The cached state is the context."""

    def draft_blocks(
        self,
        anchors: torch.Tensor,
        positions: torch.Tensor,
        tables: torch.Tensor,
        cache: torch.Tensor,
        choose: DraftChooser,
        longest: int,
    ) -> DraftedBlocks:
        value = hash_step(self._read(positions - 1, tables, cache, longest), anchors)
        tokens, confidence = [], []
        for column in range(WIDTH):
            misled = value % 4 == 0
            confidence.append(torch.where(misled, -1.5, 1.5) + (value % 7).float() / 10)
            tokens.append(choose(toy_logits(torch.where(misled, value + 1, value)), column))
            value = hash_step(value, tokens[-1])
        return DraftedBlocks(torch.stack(tokens, 1), torch.stack(confidence, 1))

    def _read(self, last: torch.Tensor, tables: torch.Tensor, cache: torch.Tensor, longest: int) -> torch.Tensor:
        """Hash of each row's cached tokens up to position `last`."""
        value = torch.full_like(last, 17)
        for place in range(longest):
            column = min(place // BLOCK, tables.shape[1] - 1)
            token = cache[tables[:, column].long() * BLOCK + place % BLOCK]
            value = torch.where(place <= last, hash_step(value, token), value)
        return value


class BoundsToy(DraftingToy):
    """The same from the device's tensors alone: of the host's batch it takes the longest row."""

    takes_bounds = True

    def forward(self, batch: ForwardBatch, cache: torch.Tensor) -> torch.Tensor:
        table, positions = batch.block_tables["kv"].long(), batch.positions
        rows = torch.searchsorted(
            batch.query_starts[1:].long(), torch.arange(len(positions)), right=True
        )
        places = table[rows, positions // BLOCK] * BLOCK + positions % BLOCK
        kept = positions >= batch.write_floors[rows]
        cache[torch.where(kept, places, 0)] = torch.where(kept, batch.token_ids, -1)  # block 0 is nobody's
        wanted = batch.logit_rows
        longest = int(batch.host.seq_lens.max())
        return self._read(positions[wanted], table[rows[wanted]], cache, longest)[:, None]


def make_drafting_engine(*, kind: type[ToyModel] = DraftingToy, **sizes: Any) -> NativeEngine:
    """A toy engine that drafts; speculation is as the engine makes it, and undecided."""
    engine = make_engine(kind=kind, **sizes)
    parts = engine._parts
    options = EngineOptions(engine="native", speculative="dspark", async_scheduling=parts.ahead > 1)
    speculation = make_speculation(options, parts.runner, parts.scheduler, parts.cache, parts.runner._sample)
    engine._parts = replace(parts, speculation=speculation)
    return engine
