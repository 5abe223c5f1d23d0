"""Steps with DSpark drafts that are launched while the step whose tokens they follow still runs.

What a step needs of the one before stays on the device: the tokens with the drafts behind them in the token buffer, how many
tokens each slot has, and the confidences of its block. A step

    shares its budget of drafts out by those confidences, and so knows its rows,
    runs the model, draws at every place, keeps the drafts that agree,
    drafts the block that follows in every row that drew,
    and leaves tokens, lengths and confidences for the next one.

The host gets copies when they are there. It reads nothing in between, and nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from deepinfer_sched import StepPlan

from deepinfer_offline.engine.native.acceptance import keep_agreeing
from deepinfer_offline.engine.native.ahead_rows import AheadState, DrawingRows, ahead_batch, lay_out
from deepinfer_offline.engine.native.results import DraftedRows, LogprobsDownload, PromptLogprobs, StepResult
from deepinfer_offline.models.base import DraftedBlocks, DraftsBlocks, Model, TakesBounds
from deepinfer_offline.ops.transfers import Download
from deepinfer_offline.sampling.device_rows import DeviceRows

if TYPE_CHECKING:
    from deepinfer_specdec.scheduling.calibration import TemperatureScaling

    from deepinfer_offline.engine.native.batch import StepInputs
    from deepinfer_offline.engine.native.runner import MaskSource, ModelRunner
    from deepinfer_offline.engine.native.whole_steps import WholeLeft
    from deepinfer_offline.ops.transfers import StepClock
    from deepinfer_offline.sampling.batch import Logprobs, SamplingTable
    from deepinfer_offline.sampling.device_draws import RowDraws


def can_run_ahead(model: Model) -> bool:
    """Whether the model computes rows whose lengths the host knows as upper bounds only.

    On a CPU any does: there a step sees the true lengths, because its memory is the host's and the step before is done.
    """
    return torch.device(model.options.device).type == "cpu" or _takes_bounds(model)


def _takes_bounds(model: Model) -> bool:
    return isinstance(model, TakesBounds) and model.takes_bounds


class AheadSteps:
    """Runs steps that were planned ahead, in the step's thread and in their order.

    Args:
        runner: of the engine; its model has a block draft.
        table: parameters by slot.
        scaling: called when a step is launched: the calibration of its confidences.

    Attributes:
        graphs: sizes in tokens that steps are padded to; none where they are not captured.
    """

    graphs: tuple[int, ...] = ()

    def __init__(self, runner: ModelRunner, table: SamplingTable, scaling: Callable[[], TemperatureScaling]) -> None:
        self._runner, self._table, self._scaling = runner, table, scaling
        self._drafts = cast("DraftsBlocks", runner.model)
        self._captured = runner.ahead_graphs
        options = runner.model.options
        self._device, self._exact = options.device, not _takes_bounds(runner.model)
        if self._captured is not None:
            self.graphs, self._state = self._captured.sizes, self._captured.state
        else:
            self._state = AheadState.of(options.max_running, self._drafts.draft_width, options.device)

    def launch(
        self, plan: StepPlan, inputs: StepInputs, masks: MaskSource | None, moves: Sequence[Future[Any]]
    ) -> Callable[[], EnqueuedAhead]:
        """The step as a call for the worker, with what the host knows now."""
        now = self._scaling()
        scaling = np.stack([now.temperatures, now.offsets]).astype(np.float32)
        return partial(self._run, plan, inputs, masks, moves, scaling)

    # --- in the step's thread --------------------------------------------------------------------------------

    def _run(
        self,
        plan: StepPlan,
        inputs: StepInputs,
        masks: MaskSource | None,
        moves: Sequence[Future[Any]],
        scaling: np.ndarray,
    ) -> EnqueuedAhead:
        clock, firsts = self._runner.start_clock(), self._firsts
        for done in moves:
            done.result()
        left = self._replay(plan, inputs, scaling) if masks is None else None
        if left is not None:
            emitted, drafts = Download(left.emitted, clock), Download(left.blocks, clock)
            rows, asked = np.arange(plan.num_rows), np.zeros(plan.num_rows, bool)
            clock.stop()
            return EnqueuedAhead(
                plan, rows, emitted, drafts, LogprobsDownload(None), asked, (), clock, self._firsts > firsts
            )
        return self._enqueue(plan, inputs, masks, scaling, clock, firsts)

    def _replay(self, plan: StepPlan, inputs: StepInputs, scaling: np.ndarray) -> WholeLeft | None:
        """Enqueue a step as one graph, where one serves it."""
        return None if self._captured is None else self._captured.whole.run(plan, inputs, scaling, self._table)

    def _enqueue(
        self,
        plan: StepPlan,
        inputs: StepInputs,
        masks: MaskSource | None,
        scaling: np.ndarray,
        clock: StepClock,
        firsts: int,
    ) -> EnqueuedAhead:
        """Enqueue a step kernel by kernel, but for what is captured of it."""
        runner = self._runner
        rows = lay_out(plan, self._state, scaling, runner.tokens)
        hidden, table = self._forward(plan, inputs, rows)
        prompts = tuple(runner.score_prompt(chunk, hidden) for chunk in inputs.prompts)
        logits = runner.logits(inputs, hidden)
        accepted, logprobs, block = None, None, None
        if logits is not None:
            params = DeviceRows(
                self._table, rows.slots, rows.lowest, rows.span, rows.most, runner.tokens.data, exact=self._exact
            )
            found = masks(inputs.samples) if masks is not None else None
            sampled = params.draws(rows.owner).sample(logits, rows.positions, *(found or (None, None)))
            drawn, logprobs = sampled.ids, sampled.logprobs
            drafted = rows.column < rows.verified[rows.owner]
            accepted = keep_agreeing(
                drawn, runner.tokens, rows.owner, rows.column, drafted, rows.places, rows.begins, rows.width
            )
            lengths = rows.first + accepted.counts
            self._state.lengths[self._slots(rows)] = lengths
            if plan.ahead is not None and plan.ahead.width:
                block = self._draft(rows, table, lengths, params, inputs)
        copies = [] if accepted is None else [accepted.token_ids, accepted.counts, rows.verified]
        blocks = [] if block is None else [block.token_ids, block.confidence]
        emitted, drafts, sent = Download(copies, clock), Download(blocks, clock), LogprobsDownload(logprobs)
        asked = self._table.logprobs[rows.slots] >= 0
        clock.stop()
        first = self._firsts > firsts
        return EnqueuedAhead(plan, rows.plan_rows, emitted, drafts, sent, asked, prompts, clock, first)

    def _forward(
        self, plan: StepPlan, inputs: StepInputs, rows: DrawingRows
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states of `HostBatch.logit_rows`; and the draft's block table, but of a captured step, which keeps it."""
        assert plan.ahead is not None
        found = None if self._captured is None else self._captured.run(inputs, rows, plan.ahead.budget)
        if found is not None:
            return found, None
        runner = self._runner
        batch = ahead_batch(plan, inputs, rows, runner.tokens, self._device, exact=self._exact)
        return runner.model.forward(batch, runner.cache), batch.block_tables[self._drafts.draft_group]

    @property
    def _firsts(self) -> int:
        """Steps so far that took longer than others like them will."""
        return 0 if self._captured is None else self._captured.firsts

    def _draft(
        self,
        rows: DrawingRows,
        table: torch.Tensor | None,
        lengths: torch.Tensor,
        params: DeviceRows,
        inputs: StepInputs,
    ) -> DraftedBlocks:
        """Draft the block that follows in every row. Its tokens stay in the token buffer, where the next step verifies them."""
        tokens, longest = self._runner.tokens, int(inputs.host.seq_lens.max())
        draws = params.draws(torch.arange(len(lengths), device=lengths.device))

        def choose(logits: torch.Tensor, column: int) -> torch.Tensor:
            ids = self._choose(draws, logits, lengths + column)
            tokens.scatter(rows.base + lengths + column, ids)
            return ids

        if table is None and self._captured is not None:
            block = self._captured.drafts.run(rows.base, lengths, longest, choose)
        else:
            assert table is not None
            anchors, tables = tokens.gather(rows.base + lengths - 1), table[rows.there].long()
            block = self._drafts.draft_blocks(anchors, lengths - 1, tables, self._runner.cache, choose, longest)
        self._state.confidence[self._slots(rows)] = block.confidence.float()
        return block

    def _choose(self, draws: RowDraws, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return draws.choose(logits, positions)

    def _slots(self, rows: DrawingRows) -> torch.Tensor:
        return rows.base // self._runner.tokens.capacity


@dataclass(frozen=True, slots=True)
class EnqueuedAhead:
    """A step whose work is enqueued.

    Attributes:
        plan: the step.
        plan_rows: int64 [D], the rows that draw.
        emitted: ids [D, w], counts [D] and verified drafts [D] on their way; nothing where nothing is drawn.
        blocks: drafted ids [D, K] and raw confidences [D, K] on their way; nothing where none were.
        logprobs: of the draws whose rows asked, and perhaps of others behind them.
        asked: bool [D], which rows did.
        prompts: log-probabilities of prompt tokens.
        clock: of the step.
        first: see `StepResult.first`.
    """

    plan: StepPlan
    plan_rows: np.ndarray
    emitted: Download
    blocks: Download
    logprobs: LogprobsDownload
    asked: np.ndarray
    prompts: tuple[PromptLogprobs, ...]
    clock: StepClock
    first: bool

    def result(self) -> StepResult:
        """Wait for the device."""
        emitted = [tensor.numpy() for tensor in self.emitted.wait()]
        blocks = [tensor.numpy() for tensor in self.blocks.wait()]
        size, width = self.plan.num_rows, emitted[0].shape[1] if emitted else 1
        ids, counts, verified = np.zeros((size, width), np.int32), np.zeros(size, np.int32), np.zeros(size, np.int32)
        draw_rows = np.zeros(0, np.int64)
        if emitted:
            ids[self.plan_rows], counts[self.plan_rows], verified[self.plan_rows] = emitted
            draw_rows = np.repeat(self.plan_rows, emitted[2] + 1)
        return StepResult(
            plan=self.plan,
            token_ids=ids,
            num_tokens=counts,
            logprobs=self._logprobs(emitted[2] + 1) if emitted else None,
            draw_rows=draw_rows,
            prompts=self.prompts,
            seconds=self.clock.seconds(),
            verified=verified,
            drafted=DraftedRows(self.plan_rows, *blocks) if blocks else None,
            first=self.first,
        )

    def _logprobs(self, draws: np.ndarray) -> Logprobs | None:
        """Those of the draws that asked, which come first in their order."""
        found = self.logprobs.wait()
        if found is None:
            return None
        places = np.flatnonzero(np.repeat(self.asked, draws))
        return replace(found.take(np.arange(len(places))), rows=places)
