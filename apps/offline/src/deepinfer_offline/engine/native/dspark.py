"""DSpark drafts in the native loop: a block for every row, from the model's own hidden states, in the step's thread.

The draft's context lies in the target's cache blocks (`deepinfer_offline.models.base.DraftsBlocks`), so this drafter keeps no
keys of its own: prefix hits bring the context along, a preempted sequence computes it again with its prompt, answers to one
prompt share it, and rejected drafts are overwritten as the target's entries are.

A drafted token is drawn like the target's will be, with the row's parameters and the position's own random number. The better
the draft's distribution, the likelier both are the same token, at any temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    from deepinfer_offline.engine.native.runner import ModelRunner

STS_FILE = "sts.json"  # temperatures beside a draft's weights, as the trainer writes them

ChooseFn = Callable[[torch.Tensor, SamplingBatch], torch.Tensor]
"""`Sampler.choose`: float32 logits [n, vocab] and the rows -> int64 [n]."""


@dataclass(slots=True)
class _Guess:
    """A block whose outcome is not fully known: what the sequence says next settles it."""

    token_ids: list[int]
    logits: np.ndarray
    right: int = 0


class DSparkDrafter:
    """Implements `deepinfer_specdec.Drafter` over a runner's model. Called by the loop's thread only.

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
        self._guesses: dict[int, _Guess] = {}
        self._settled: list[tuple[np.ndarray, int, int]] = []  # logits, right, known

    def begin(self, sequence: int, token_ids: Sequence[int] | np.ndarray) -> None:
        """See `Drafter.begin`: the scheduler knows the sequence already."""

    def extend(self, sequence: int, token_ids: Sequence[int] | np.ndarray) -> None:
        """See `Drafter.extend`: settles the sequence's last block as far as the tokens reach, verified or not."""
        guess = self._guesses.get(sequence)
        if guess is None:
            return
        for token in token_ids:
            if guess.right == len(guess.token_ids) or guess.token_ids[guess.right] != token:
                self._settle(sequence, whole=True)
                return
            guess.right += 1

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

    def end(self, sequence: int) -> None:
        """See `Drafter.end`."""
        self._settle(sequence, whole=False)

    def guess(self, sequences: Sequence[int], tokens: np.ndarray, logits: np.ndarray) -> None:
        """Blocks [R, K] were drafted, here or in a step: calibration learns from what the sequences say next."""
        for sequence, row_tokens, row_logits in zip(sequences, tokens.tolist(), logits, strict=True):
            self._settle(sequence, whole=False)
            self._guesses[sequence] = _Guess(row_tokens, row_logits)
        self._learn()

    # --- blocks ----------------------------------------------------------------------------------------------

    def _draft(self, sequences: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens int64 [R, K] and raw confidences float32 [R, K]; waits for the steps that were launched before."""
        rows = [self._scheduler.sequence(sequence) for sequence in sequences]
        slots = np.array([row.slot for row in rows], np.int64)
        anchors = np.array([row.tokens[-1] for row in rows], np.int64)
        positions = np.array([len(row.tokens) for row in rows], np.int64) - 1
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

    # --- calibration -----------------------------------------------------------------------------------------

    def _settle(self, sequence: int, *, whole: bool) -> None:
        """Take a block out: `whole` when a token differed, so that the fate of every column is known."""
        guess = self._guesses.pop(sequence, None)
        if guess is not None:
            self._settled.append((guess.logits, guess.right, len(guess.token_ids) if whole else guess.right))

    def _learn(self) -> None:
        if self._settled:
            logits, right, known = zip(*self._settled, strict=True)
            self.calibration.observe(np.stack(logits), np.array(right), np.array(known))
            self._settled = []


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
