"""DSpark drafts in the native loop: a block for every row, from the model's own hidden states, in the step's thread.

The draft's context lies in the target's cache blocks (`deepinfer_offline.models.base.DraftsBlocks`), so this drafter keeps no
keys of its own: prefix hits bring the context along, a preempted sequence computes it again with its prompt, answers to one
prompt share it, and rejected drafts are overwritten as the target's entries are.

A drafted token is drawn like the target's will be, with the row's parameters and the position's own random number. The better
the draft's distribution, the likelier both are the same token, at any temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from deepinfer_specdec import Draft
from deepinfer_specdec.draft import PAD
from deepinfer_specdec.errors import CalibrationError
from deepinfer_specdec.scheduling.calibration import OnlineCalibration, TemperatureScaling, fit_conditional

from deepinfer_offline.engine.base import EngineStartError
from deepinfer_offline.models.base import DraftsBlocks, Model
from deepinfer_offline.ops.transfers import upload
from deepinfer_offline.sampling.batch import SamplingBatch

if TYPE_CHECKING:
    from deepinfer_sched import Scheduler

    from deepinfer_offline.engine.native.batch import TableSource
    from deepinfer_offline.engine.native.results import StepResult
    from deepinfer_offline.engine.native.runner import ModelRunner

STS_FILE = "sts.json"  # temperatures beside a draft's weights, as the trainer writes them

ChooseFn = Callable[[torch.Tensor, SamplingBatch], torch.Tensor]
"""`Sampler.choose`: float32 logits [n, vocab] and the rows -> int64 [n]."""


class DSparkDrafter:
    """Implements `deepinfer_specdec.Drafter` over a runner's model. Called by the loop's thread only.

    It drafts from what the engine has cached, so `Drafter.begin`, `extend` and `end` do nothing. What became of its blocks it
    hears from the steps, verified or not: each slot's last block waits until tokens have settled it.

    Args:
        runner: of the engine; its model has a draft.
        scheduler: knows the sequences.
        tables: `CacheManager.block_table`.
        choose: draws tokens.
        scaling: temperatures that the confidences begin with.
    """

    name = "dspark"

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        tables: TableSource,
        choose: ChooseFn,
        scaling: TemperatureScaling | None = None,
    ) -> None:
        self._runner, self._scheduler, self._tables, self._choose = runner, scheduler, tables, choose
        self._model = cast("DraftsBlocks", runner.model)
        self._device = runner.model.options.device
        group = next(g for g in runner.model.facts.cache_groups if g.name == self._model.draft_group)
        self._block_size = group.block_size
        self.max_draft = self._model.draft_width
        # Blocks are known as far as they were kept, and as a whole after a rejection: other fits would be biased by that.
        self.calibration = OnlineCalibration(self.max_draft, start=scaling, fit=fit_conditional)
        slots = len(scheduler.state.seq_ids)
        self._of = np.full(slots, -1, np.int64)  # the sequence whose block waits in a slot; -1 for none
        # Nothing that is said agrees with what follows a block.
        self._tokens = np.full((slots, 2 * self.max_draft + 1), PAD, np.int32)
        self._logits = np.zeros((slots, self.max_draft), np.float32)
        self._right = np.zeros(slots, np.int64)  # drafts of it that the sequence has said
        self._heard = np.zeros(slots, np.int64)  # the sequence's tokens then
        self._last_slots = np.zeros(0, np.int64)
        self._settled: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # logits, right, known

    def begin(self, sequence: int, token_ids: Sequence[int] | np.ndarray) -> None:
        """See the class."""

    def extend(self, sequence: int, token_ids: Sequence[int] | np.ndarray) -> None:
        """See the class."""

    def end(self, sequence: int) -> None:
        """See the class."""

    def propose(self, sequences: Sequence[int], limits: np.ndarray | None = None, floor: float = 0.0) -> Draft:
        """See `Drafter.propose`. A block is drawn whole, whatever `floor`; its confidences are calibrated."""
        width = self.max_draft
        counts = np.full(len(sequences), width) if limits is None else np.clip(limits, 0, width)
        drafting = np.flatnonzero(counts > 0)
        ids = np.full((len(sequences), width), PAD, np.int32)
        sure = np.zeros((len(sequences), width), np.float32)
        if len(drafting):
            chosen = [sequences[row] for row in drafting.tolist()]
            tokens, logits = self._draft(chosen)
            self.guess(chosen, tokens, logits)
            inside = np.arange(width) < counts[drafting, None]
            ids[drafting] = np.where(inside, tokens, PAD)
            sure[drafting] = np.where(inside, self.calibration.scaling.confidences(logits), 0.0)
        return Draft(ids, counts.astype(np.int32), sure)

    def guess(self, sequences: Sequence[int] | np.ndarray, tokens: np.ndarray, logits: np.ndarray) -> None:
        """Blocks [R, K] were drafted, here or in a step: calibration learns from what the running sequences say next."""
        sequences = np.asarray(sequences)
        slots = self._slots(sequences)
        self._settle(slots[self._of[slots] >= 0])
        self._of[slots], self._right[slots] = sequences, 0
        self._heard[slots] = self._scheduler.state.length[slots]
        self._tokens[slots, : self.max_draft], self._logits[slots] = tokens, logits
        if self._settled:
            self.calibration.observe(*(np.concatenate(parts) for parts in zip(*self._settled, strict=True)))
            self._settled = []

    def hear(self, result: StepResult) -> None:
        """See `HearsSteps.hear`: settles the blocks of the sequences that have said something else, or more."""
        plan, slots, counts = result.plan, result.plan.slots, result.num_tokens
        lengths = self._scheduler.state.length[slots]
        # A sequence that was preempted may have said something elsewhere.
        follow = (self._of[slots] == plan.seq_ids) & (counts > 0) & (self._heard[slots] + counts == lengths)
        said = result.token_ids
        if not follow.all():
            slots, counts, lengths, said = slots[follow], counts[follow], lengths[follow], said[follow]
        if not slots.size:
            return
        self._heard[slots] = lengths
        width = min(said.shape[1], self.max_draft + 1)
        right, columns = self._right[slots], np.arange(width)
        guessed = self._tokens.take((slots * self._tokens.shape[1] + right)[:, None] + columns)
        agree = np.zeros((slots.size, width + 1), bool)
        agree[:, :width] = (guessed == said[:, :width]) & (columns < counts[:, None])
        more = agree.argmin(axis=1)  # the first place where they do not
        self._right[slots] = right + more
        self._settle(slots[more < counts], self.max_draft)

    # --- blocks ----------------------------------------------------------------------------------------------

    def _draft(self, sequences: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens int64 [R, K] and raw confidences float32 [R, K]; waits for the steps that were launched before."""
        slots = self._slots(sequences)
        anchors = np.array([self._scheduler.sequence(sequence).tokens[-1] for sequence in sequences], np.int64)
        positions = self._scheduler.state.length[slots].astype(np.int64) - 1
        columns = int(positions.max()) // self._block_size + 1
        tables = self._tables(self._model.draft_group)[slots, :columns].astype(np.int64)
        return self._runner.move(lambda: self._run(slots, anchors, positions, tables)).result()

    def _run(
        self, slots: np.ndarray, anchors: np.ndarray, positions: np.ndarray, tables: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """In the step's thread. The drafts stand in the token buffer while penalties may look for them, no longer."""
        tokens = self._runner.tokens
        places = tokens.flat_index(slots[:, None], positions[:, None] + 1 + np.arange(self.max_draft))
        anchors_there, positions_there, tables_there, places_there = upload(
            [anchors, positions, tables, places], self._device
        )
        before = tokens.gather(places_there.flatten())

        def choose(logits: torch.Tensor, column: int) -> torch.Tensor:
            ids = self._choose(logits, SamplingBatch(slots, positions + 1 + column, tokens.data))
            tokens.scatter(places_there[:, column], ids)
            return ids

        try:
            block = self._model.draft_blocks(
                anchors_there, positions_there, tables_there, self._runner.cache, choose, int(positions.max())
            )
        finally:
            tokens.scatter(places_there.flatten(), before)
        return block.token_ids.cpu().numpy(), block.confidence.float().cpu().numpy()

    # --- bookkeeping -----------------------------------------------------------------------------------------

    def _slots(self, sequences: Sequence[int] | np.ndarray) -> np.ndarray:
        """int64 [R], where these running sequences are."""
        there = self._scheduler.state.seq_ids
        last = self._last_slots
        if len(last) == len(sequences) and (there[last] == sequences).all():
            return last
        order = np.argsort(there)
        self._last_slots = order[np.searchsorted(there, sequences, sorter=order)]
        return self._last_slots

    def _settle(self, slots: np.ndarray, known: int | None = None) -> None:
        """Take the blocks of these slots out. `known`: drafts of each that have a fate, all once one was wrong; None for those
        that were right.
        """
        if slots.size:
            right = self._right[slots]
            self._settled.append((self._logits[slots], right, right if known is None else np.full(slots.size, known)))
            self._of[slots] = -1


def can_draft(model: Model) -> bool:
    """Whether the model has a block draft."""
    return isinstance(model, DraftsBlocks) and model.draft_width > 0


def make_dspark(
    runner: ModelRunner, scheduler: Scheduler, tables: TableSource, choose: ChooseFn, folder: Path | None
) -> DSparkDrafter:
    """The drafter of a model with a draft, whose steps write the draft's context from now on.

    Args:
        runner, scheduler, tables, choose: see `DSparkDrafter`.
        folder: of the draft, to look for `sts.json` in; None for the model's own draft.

    Raises:
        EngineStartError: the temperatures are unreadable, or blocks are longer than what a step verifies.
    """
    model = cast("DraftsBlocks", runner.model)
    most = runner.tokens.capacity - runner.model.options.max_model_len - 1
    if model.draft_width > most:
        raise EngineStartError(f"the draft's block_size {model.draft_width} is more than the {most} drafts of a step")
    model.start_drafting()
    scaling = None
    if folder is not None and (folder / STS_FILE).exists():
        try:
            scaling = TemperatureScaling.load(folder / STS_FILE)
        except CalibrationError as error:
            raise EngineStartError(f"--draft-model: {error}") from error
    return DSparkDrafter(runner, scheduler, tables, choose, scaling)
