"""Captured steps of the loop ahead whose rows all take their likeliest tokens: one CUDA graph shares the drafts out, runs the
model, keeps the drafts that agree and drafts the next block.

Such a step costs the host a copy and a launch. Uncaptured it would be some thousand launches of small kernels.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from deepinfer_sched import StepPlan

from deepinfer_offline.engine.native.ahead_rows import AheadState
from deepinfer_offline.engine.native.batch import StepInputs
from deepinfer_offline.engine.native.capture import Recorder
from deepinfer_offline.engine.native.draft_graphs import context_bucket
from deepinfer_offline.engine.native.greedy_buffers import GreedyBucket, GreedyBuffers, GreedyRows
from deepinfer_offline.engine.native.repeated import Repeated
from deepinfer_offline.engine.native.step_memory import StepMemory
from deepinfer_offline.engine.native.tokens import TokenBuffer
from deepinfer_offline.ops.cuda.support import kernels

_MOST = 64  # graphs


@dataclass(frozen=True, slots=True)
class GreedyLeft:
    """What such a step leaves of its R rows, which the next captured step overwrites. K drafts a block, W tokens a row at most.

    Attributes:
        emitted: int64 ids [R, W], counts [R] and verified drafts [R].
        blocks: drafted ids int64 [R, K] and raw confidences float32 [R, K]; nothing where nothing is drafted.
    """

    emitted: tuple[torch.Tensor, ...]
    blocks: tuple[torch.Tensor, ...]


class GreedySteps:
    """Captures such steps when a bucket occurs again, and replays them. Used by the thread that runs the steps.

    Args:
        model: takes no decision from the host in a step whose lengths are upper bounds, and drafts without one.
        cache: of the model.
        tokens: the token buffer.
        recorder: records graphs.
        memory: where they find their inputs.
        state: of the slots.
        rows: sizes of batches, ascending; the last one holds all that run at once.
        sizes: the same of tokens, all of `rows` among them.
    """

    def __init__(
        self,
        model: Any,
        cache: Any,
        tokens: TokenBuffer,
        recorder: Recorder,
        memory: StepMemory,
        state: AheadState,
        rows: Sequence[int],
        sizes: Sequence[int],
    ) -> None:
        self._model, self._cache, self._tokens, self._state = model, cache, tokens, state
        self._rows, self._sizes, self._limit = rows, sizes, memory.limit
        self._running, self._width = rows[-1], model.draft_width

        def make(bucket: GreedyBucket) -> GreedyBuffers:
            return GreedyBuffers.of(memory, bucket, self._width, self._running)

        self._repeated = Repeated(recorder, make, self._work, _MOST)

    @property
    def tries(self) -> int:
        """Captures so far, those that found no memory among them."""
        return self._repeated.tries

    @property
    def captured(self) -> list[GreedyBucket]:
        """What is captured."""
        return sorted(self._repeated.captured)

    def run(self, plan: StepPlan, inputs: StepInputs, scaling: np.ndarray) -> GreedyLeft | None:
        """Enqueue a step whose rows ask for nothing but their likeliest tokens, unless no graph can serve it."""
        assert plan.ahead is not None
        host, count = inputs.host, plan.num_rows
        tokens = count + plan.ahead.budget
        if not count or host.prefills.any() or tokens > self._sizes[-1]:
            return None
        padded = self._sizes[bisect_left(self._sizes, tokens)]
        width = min(1 + self._width, padded) if plan.ahead.budget else 1
        longest = context_bucket(int(host.seq_lens.max()), self._limit) if plan.ahead.width else 0
        bucket = GreedyBucket(padded, self._rows[bisect_left(self._rows, count)], width, longest)
        self._repeated.buffers(bucket).fill(plan, inputs, scaling)
        left = tuple(part[:count] for part in self._repeated.run(bucket))
        return GreedyLeft(left[:3], left[3:])

    def _work(self, buffers: GreedyBuffers) -> tuple[torch.Tensor, ...]:
        """What is captured."""
        state, rows = self._state, buffers.lay_out(self._state)
        hidden = self._model.forward(buffers.batch(rows, self._tokens), self._cache)
        ids, counts = self._keep(buffers.bucket.width, rows, self._draw(hidden))
        lengths = rows.first + counts
        state.lengths.index_copy_(0, rows.slots, lengths)
        if not buffers.bucket.longest:
            return ids, counts, rows.verified
        drafted, confidence = self._draft(buffers, rows.slots, lengths)
        state.confidence.index_copy_(0, rows.slots, confidence)
        return ids, counts, rows.verified, drafted, confidence

    def _draw(self, hidden: torch.Tensor) -> torch.Tensor:
        """int64 [T], each token's likeliest successor; as many at once as there is memory for logits of."""
        parts = [kernels().argmax(self._model.logits(part)) for part in hidden.split(self._running)]
        return torch.cat(parts)

    def _keep(self, width: int, rows: GreedyRows, drawn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`acceptance.keep_agreeing` by rows: ids int64 [R, width], left-aligned, and how many count.

        Rows that pad write to the token buffer's scratch place.
        """
        column, verified = torch.arange(width, device=drawn.device), rows.verified[:, None]
        said = drawn[(rows.begins[:-1, None] + column).clamp_max(len(drawn) - 1)]
        places = self._places(rows.slots, rows.first)[:, None] + column
        places = places.clamp_max(self._tokens.scratch)
        agree = (self._tokens.gather(places) == said) & (column < verified)
        accepted = agree.long().cumprod(1).sum(1)
        last = accepted[:, None]
        self._tokens.scatter(places.gather(1, last)[:, 0], said.gather(1, last)[:, 0])
        return said * (column <= last), accepted + 1

    def _draft(
        self, buffers: GreedyBuffers, slots: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The block that follows in every row, [R, K] ids and confidences: of as many rows at once as there is memory for."""
        table, tokens = buffers.tables[self._model.draft_group], self._tokens
        places, parts = self._places(slots, lengths), []
        for start in range(0, len(slots), size := max(1, self._running // self._width)):
            part = slice(start, start + size)
            anchors = tokens.gather(places[part] - 1)
            states = self._model.draft_states(
                anchors, lengths[part] - 1, table[part].long(), self._cache, buffers.bucket.longest
            )
            parts.append(self._model.finish_blocks(states, anchors, self._choose(places[part])))
        return torch.cat([part.token_ids for part in parts]), torch.cat([part.confidence for part in parts])

    def _choose(self, places: torch.Tensor) -> Callable[[torch.Tensor, int], torch.Tensor]:
        """Takes the likeliest tokens, and puts them where the next step verifies them."""
        tokens = self._tokens

        def choose(logits: torch.Tensor, column: int) -> torch.Tensor:
            return kernels().argmax(logits, flat=tokens.flat, where=(places + column).clamp_max(tokens.scratch))

        return choose

    def _places(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """int64 [R], where the slots' positions are in the flat token buffer; the idle slot's all at its scratch place."""
        return (slots * self._tokens.capacity + positions).clamp_max(self._tokens.scratch)
