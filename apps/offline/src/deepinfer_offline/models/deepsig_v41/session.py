"""Runs sequences through a model without an engine: private block tables, one forward a call.

For comparing with other implementations, for benchmarks and for tests of the cache rules. The native engine has a scheduler and a
cache manager of its own; this class only shows what a batch must carry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer_offline.models.base import ForwardBatch, HostBatch
from deepinfer_offline.models.deepsig_v41.cache import GLOBAL, PAIRS, WINDOW
from deepinfer_offline.models.deepsig_v41.model import DeepSigV41Model


@dataclass(frozen=True)
class Chunk:
    """Rows that one sequence computes in a step.

    Attributes:
        slot: the sequence.
        start: position of the first row.
        count: rows.
        prefill: prompt rows; False for decode and verification rows.
        floor: window floor (replay start).
        write_floor: global entries that end below it are not written.
        keep_all: no row may be dropped by decoder replay.
        wanted: how many of the last rows' logits to return; None = all.
    """

    slot: int
    start: int
    count: int
    prefill: bool = True
    floor: int = 0
    write_floor: int = 0
    keep_all: bool = False
    wanted: int | None = 1


class Session:
    """Slots with room for `capacity` tokens each; every block of a slot belongs to it alone.

    Args:
        model: a loaded model.
        slots: sequences.
        capacity: tokens of a sequence.
        seed: shuffles which blocks a slot gets; None gives them in order.
    """

    def __init__(self, model: DeepSigV41Model, slots: int = 1, capacity: int = 256, seed: int | None = None) -> None:
        self.model = model
        size = model.options.block_size
        columns = -(-capacity // size)
        blocks = np.arange(1, slots * columns + 1)
        if seed is not None:
            np.random.default_rng(seed).shuffle(blocks)
        table = blocks.reshape(slots, columns).astype(np.int32)
        names = [group.name for group in model.facts.cache_groups]
        self.tables = {name: table for name in names if name in (GLOBAL, WINDOW)}
        if PAIRS in names:
            self.tables[PAIRS] = np.arange(1, slots + 1, dtype=np.int32)[:, None]
        counts = {name: slots + 1 if name == PAIRS else slots * columns + 1 for name in names}
        self.cache = model.allocate_cache(counts)
        self.tokens = torch.zeros(slots, capacity, dtype=torch.int32)

    def write(self, slot: int, start: int, ids: Sequence[int]) -> None:
        """Put token ids into the slot's buffer."""
        self.tokens[slot, start : start + len(ids)] = torch.as_tensor(np.asarray(ids), dtype=torch.int32)

    def batch(self, chunks: Sequence[Chunk]) -> ForwardBatch:
        """The batch of some chunks; rows of one token come first, as the contract says."""
        chunks = sorted(chunks, key=lambda chunk: chunk.count != 1)
        slots = np.array([c.slot for c in chunks], np.int32)
        counts = np.array([c.count for c in chunks])
        starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        positions = np.concatenate([np.arange(c.start, c.start + c.count) for c in chunks])
        wanted = [c.count if c.wanted is None else c.wanted for c in chunks]
        logit_rows = np.concatenate([np.arange(starts[i + 1] - w, starts[i + 1]) for i, w in enumerate(wanted)])
        host = HostBatch(
            query_starts=starts,
            seq_lens=np.array([c.start + c.count for c in chunks], np.int32),
            slots=slots,
            prefills=np.array([c.prefill for c in chunks]),
            floors=np.array([c.floor for c in chunks], np.int32),
            write_floors=np.array([c.write_floor for c in chunks], np.int32),
            keep_all=np.array([c.keep_all for c in chunks]),
            logit_rows=logit_rows.astype(np.int64),
            block_tables={name: table[slots] for name, table in self.tables.items()},
            num_decodes=int((counts == 1).sum()),
        )
        rows = np.repeat(slots, counts).astype(np.int64)
        return ForwardBatch(
            token_ids=self.tokens[torch.from_numpy(rows), torch.from_numpy(positions)].to(torch.int64),
            positions=torch.from_numpy(positions.astype(np.int64)),
            query_starts=torch.from_numpy(host.query_starts),
            seq_lens=torch.from_numpy(host.seq_lens),
            slots=torch.from_numpy(host.slots),
            floors=torch.from_numpy(host.floors),
            write_floors=torch.from_numpy(host.write_floors),
            logit_rows=torch.from_numpy(host.logit_rows),
            block_tables={name: torch.from_numpy(table) for name, table in host.block_tables.items()},
            cascades=(),
            tokens=self.tokens,
            host=host,
        )

    def run(self, *chunks: Chunk) -> Tensor:
        """One step: the logits of the wanted rows, float32 [n, vocab], chunks of one token first."""
        return self.model.logits(self.model.forward(self.batch(chunks), self.cache))

    def prefill(self, slot: int, ids: Sequence[int], sizes: Sequence[int] | None = None, **fields: object) -> Tensor:
        """Run a prompt from position 0 in chunks of `sizes`; all logits of `keep_all` chunks, else each chunk's last."""
        self.write(slot, 0, ids)
        parts, start = [], 0
        for size in sizes or [len(ids)]:
            parts.append(self.run(Chunk(slot, start, size, **fields)))  # pyrefly: ignore
            start += size
        return torch.cat(parts)


def whole_sequence_logits(model: DeepSigV41Model, ids: Sequence[int]) -> Tensor:
    """Logits of every position of one sequence in a single forward, float32 [n, vocab]."""
    session = Session(model, capacity=len(ids))
    return session.prefill(0, ids, keep_all=True, wanted=None)
