"""Captured steps of the loop ahead as a whole: one CUDA graph shares the drafts out, runs the model, draws, keeps the drafts that
agree and drafts the next block.

Such a step costs the host a copy and a launch. Uncaptured it would be some thousand launches of small kernels.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from deepinfer_sched import StepPlan

from deepinfer_offline.engine.native.ahead_rows import AheadState
from deepinfer_offline.engine.native.batch import StepInputs
from deepinfer_offline.engine.native.capture import Recorder
from deepinfer_offline.engine.native.draft_graphs import context_bucket
from deepinfer_offline.engine.native.repeated import Repeated
from deepinfer_offline.engine.native.step_memory import StepMemory
from deepinfer_offline.engine.native.tokens import TokenBuffer
from deepinfer_offline.engine.native.whole_buffers import WholeBucket, WholeBuffers, WholeRows, span
from deepinfer_offline.models.base import DraftChooser
from deepinfer_offline.ops.cuda.support import kernels
from deepinfer_offline.sampling.batch import SamplingTable
from deepinfer_offline.sampling.captured_rows import CapturedRows
from deepinfer_offline.sampling.device_rows import asks_of
from deepinfer_offline.sampling.draw import used_filters

_MOST = 64  # graphs


@dataclass(frozen=True, slots=True)
class WholeLeft:
    """What such a step leaves of its R rows, which the next captured step overwrites. K drafts a block, W tokens a row at most.

    Attributes:
        emitted: int64 ids [R, W], counts [R] and verified drafts [R].
        blocks: drafted ids int64 [R, K] and raw confidences float32 [R, K]; nothing where nothing is drafted.
    """

    emitted: tuple[torch.Tensor, ...]
    blocks: tuple[torch.Tensor, ...]


class WholeSteps:
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

        def make(bucket: WholeBucket) -> WholeBuffers:
            return WholeBuffers.of(memory, bucket, self._width, self._running)

        self._repeated = Repeated(recorder, make, self._work, _MOST)

    @property
    def tries(self) -> int:
        """Captures so far, those that found no memory among them."""
        return self._repeated.tries

    @property
    def firsts(self) -> int:
        """See `Repeated.firsts`."""
        return self._repeated.firsts

    @property
    def captured(self) -> list[WholeBucket]:
        """What is captured."""
        return sorted(self._repeated.captured)

    def run(self, plan: StepPlan, inputs: StepInputs, scaling: np.ndarray, table: SamplingTable) -> WholeLeft | None:
        """Enqueue a step, unless no graph can serve it: one with prompts, or with rows that ask for more than filters."""
        assert plan.ahead is not None
        host, count = inputs.host, plan.num_rows
        tokens = count + plan.ahead.budget
        if not count or host.prefills.any() or tokens > self._sizes[-1]:
            return None
        draws = _draws(plan, table)
        if draws is None or (draws and _reach(plan) > span(self._width)):
            return None
        padded = self._sizes[bisect_left(self._sizes, tokens)]
        width = min(1 + self._width, padded) if plan.ahead.budget else 1
        longest = context_bucket(int(host.seq_lens.max()), self._limit) if plan.ahead.width else 0
        bucket = WholeBucket(padded, self._rows[bisect_left(self._rows, count)], width, longest, draws)
        self._repeated.buffers(bucket).fill(plan, inputs, scaling, table)
        left = tuple(part[:count] for part in self._repeated.run(bucket))
        return WholeLeft(left[:3], left[3:])

    def _work(self, buffers: WholeBuffers) -> tuple[torch.Tensor, ...]:
        """What is captured."""
        state, rows = self._state, buffers.lay_out(self._state)
        params, batch = buffers.drawing(self._model.facts.vocab_size), buffers.batch(rows, self._tokens)
        hidden = self._model.forward(batch, self._cache)
        drawn = self._draw(hidden, params, rows, batch.positions)
        ids, counts = self._keep(buffers.bucket.width, rows, drawn)
        lengths = rows.first + counts
        state.lengths.index_copy_(0, rows.slots, lengths)
        if not buffers.bucket.longest:
            return ids, counts, rows.verified
        drafted, confidence = self._draft(buffers, params, rows.slots, lengths)
        state.confidence.index_copy_(0, rows.slots, confidence)
        return ids, counts, rows.verified, drafted, confidence

    def _draw(
        self, hidden: torch.Tensor, params: CapturedRows | None, rows: WholeRows, positions: torch.Tensor
    ) -> torch.Tensor:
        """int64 [T], each token's successor; as many at once as there is memory for logits of."""
        parts = hidden.split(self._running)
        if params is None:
            return torch.cat([kernels().argmax(self._model.logits(part)) for part in parts])
        number, last = torch.arange(len(hidden), device=hidden.device, dtype=torch.int32), len(rows.slots) - 1
        owner = torch.searchsorted(rows.begins[1:], number, right=True)
        owned, owner = owner <= last, owner.clamp_max(last)
        positions = torch.where(owned, positions + 1, params.lowest[owner])
        where = zip(parts, owner.split(self._running), positions.split(self._running), strict=True)
        return torch.cat([params.draw(self._model.logits(part), some, at) for part, some, at in where])

    def _keep(self, width: int, rows: WholeRows, drawn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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
        self, buffers: WholeBuffers, params: CapturedRows | None, slots: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The block that follows in every row, [R, K] ids and confidences."""
        table, longest = buffers.tables[self._model.draft_group].long(), buffers.bucket.longest
        places = self._places(slots, lengths)
        anchors = self._tokens.gather(places - 1)
        hidden = self._model.draft_states(anchors, lengths - 1, table, self._cache, longest)
        block = self._model.finish_blocks(hidden, anchors, self._chooser(places, params, lengths))
        return block.token_ids, block.confidence

    def _chooser(self, places: torch.Tensor, params: CapturedRows | None, lengths: torch.Tensor) -> DraftChooser:
        """Draws tokens, and puts them where the next step verifies them."""
        tokens, rows = self._tokens, torch.arange(len(places), device=places.device)

        def choose(logits: torch.Tensor, column: int) -> torch.Tensor:
            where = (places + column).clamp_max(tokens.scratch)
            if params is None:
                return kernels().argmax(logits, flat=tokens.flat, where=where)
            ids = params.draw(logits, rows, lengths + column)
            tokens.scatter(where, ids)
            return ids

        return choose

    def _places(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """int64 [R], where the slots' positions are in the flat token buffer; the idle slot's all at its scratch place."""
        return (slots * self._tokens.capacity + positions).clamp_max(self._tokens.scratch)


def _draws(plan: StepPlan, table: SamplingTable) -> tuple[str, ...] | None:
    """See `WholeBucket.draws`; None where a row asks for something else."""
    slots = plan.slots
    asks = asks_of(table, slots, plan.starts + 1 - plan.slack)
    if any(asks[name].any() for name in ("held", "biased", "penalised", "logprobs")):
        return None
    if not asks["random"].any():
        return ()
    return "random", *used_filters(table, slots)


def _reach(plan: StepPlan) -> int:
    """Positions from the lowest on at which a row may draw or draft."""
    assert plan.ahead is not None
    return int((plan.slack + plan.drafts).max(initial=0)) + 1 + plan.ahead.width
