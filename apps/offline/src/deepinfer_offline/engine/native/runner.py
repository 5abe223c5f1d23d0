"""The model runner: launches a planned step and collects what it drew."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from deepinfer_sched import StepPlan

from deepinfer_offline.engine.native.acceptance import accept_drafts
from deepinfer_offline.engine.native.batch import (
    PromptRows,
    SampleRows,
    StepInputs,
    TableSource,
    device_batch,
    plan_inputs,
)
from deepinfer_offline.engine.native.graphs import make_graphs
from deepinfer_offline.engine.native.results import LogprobsDownload, PromptLogprobs, StepResult
from deepinfer_offline.engine.native.tokens import TokenBuffer
from deepinfer_offline.engine.native.worker import DeviceWorker, InlineWorker, ThreadWorker, Worker
from deepinfer_offline.models.base import Model
from deepinfer_offline.ops.transfers import Download, StepClock, upload
from deepinfer_offline.sampling.batch import Logprobs, SampledTokens, SamplingBatch
from deepinfer_offline.sampling.logprobs import gather_logprobs

if TYPE_CHECKING:
    from deepinfer_offline.engine.native.ahead_graphs import AheadGraphs
    from deepinfer_offline.engine.native.ahead_step import AheadSteps, EnqueuedAhead

SampleFn = Callable[[torch.Tensor, SamplingBatch], SampledTokens]
"""`Sampler.__call__`: float32 logits [n, vocab] and the rows -> drawn tokens."""

MaskSource = Callable[[SampleRows], tuple[np.ndarray, np.ndarray] | None]
"""Called in the step's thread when the logits are there. May wait for the tokens of the step before.
Returns (mask_rows int64 [m] into the draws, masks int32 [m, ceil(vocab / 32)]) or None."""

MAX_DRAFTS = 16  # of a row in one step

_PROMPT_LOGITS_ROWS = 256  # prompt rows whose logits exist at once: 256 x 49152 x 4 bytes = 48 MiB


@dataclass(frozen=True, slots=True)
class Flight:
    """A launched step."""

    plan: StepPlan
    future: Future[_Enqueued | EnqueuedAhead]


@dataclass(frozen=True, slots=True)
class NewSequence:
    """What a slot is loaded with.

    Attributes:
        slot: from `Sequence.slot`.
        token_ids: ids from position 0: the prompt, and generated ones when it resumes.
        prompt_logprobs: (prompt length, likeliest tokens to report) to get log-probabilities of prompt tokens.
        before: also run in the step's thread, e.g. to fill the slot's row of the sampling table.
    """

    slot: int
    token_ids: Sequence[int]
    prompt_logprobs: tuple[int, int] | None = None
    before: Callable[[], Any] | None = None


@dataclass(frozen=True, slots=True)
class _Enqueued:
    """A step whose work is enqueued; on a CPU it is also done.

    Attributes:
        plan: the step.
        samples: what it draws.
        verified: ids and counts by plan row of a step with drafts, which are known already; else None.
        ids: the drawn ids, on their way to the host.
        logprobs: of the draws, on the device or on their way.
        prompts: log-probabilities of prompt tokens.
        clock: of the step.
    """

    plan: StepPlan
    samples: SampleRows
    verified: tuple[np.ndarray, np.ndarray] | None
    ids: Download
    logprobs: LogprobsDownload
    prompts: tuple[PromptLogprobs, ...]
    clock: StepClock

    def result(self) -> StepResult:
        """Wait for the device."""
        ids, counts = self.verified or self._drawn()
        logprobs = self.logprobs.wait()
        rows = self.samples.plan_rows
        seconds = self.clock.seconds()
        return StepResult(self.plan, ids, counts, logprobs, rows, self.prompts, seconds, self.plan.drafts)

    def _drawn(self) -> tuple[np.ndarray, np.ndarray]:
        ids = np.zeros((self.plan.num_rows, 1), np.int32)
        counts = np.zeros(self.plan.num_rows, np.int32)
        for drawn in self.ids.wait():
            ids[self.samples.plan_rows, 0] = drawn.numpy()
            counts[self.samples.plan_rows] = 1
        return ids, counts


class ModelRunner:
    """Owns the model, its cache and the token buffer. One caller launches and collects, in the order of the steps.

    Everything that touches the device runs in the worker in the order of the calls, so a sequence added before a launch
    is seen by it, and a decode row reads the id that the step before drew.

    Args:
        model: the loaded model.
        num_blocks: blocks of each cache group.
        tables: `CacheManager.block_table`. Read inside `launch` only.
        sample: the sampler.
        threads: kernel threads of the worker on a CPU; 0 runs each step inside `launch`.
        max_drafts: positions kept in the token buffer past `max_model_len`.
    """

    def __init__(
        self,
        model: Model,
        num_blocks: Mapping[str, int],
        tables: TableSource,
        sample: SampleFn,
        *,
        threads: int = 0,
        max_drafts: int = MAX_DRAFTS,
    ) -> None:
        options = model.options
        self.model = model
        self._tables = tables
        self._sample = sample
        self.ahead: AheadSteps | None = None  # for plans that say so; given by whoever plans them
        self._prompt_logprobs: dict[int, tuple[int, int]] = {}
        self._moves: list[Future[Any]] = []
        self._clock: StepClock | None = None  # of the step that was enqueued last
        self._worker = _make_worker(options.device, threads)
        columns = token_columns(options.max_model_len, max_drafts)
        # Made in the worker too: every other thread that ever ran a parallel torch operation keeps a team of kernel
        # threads, and OpenMP cuts the spinning of all teams short when they outnumber the processors.
        self.tokens = self._worker.submit(lambda: TokenBuffer(options.max_running, columns, options.device)).result()
        self.cache: Any = self._worker.submit(lambda: model.allocate_cache(num_blocks)).result()
        self._graphs = make_graphs(model, self.cache, self.tokens)

    @property
    def graph_bytes(self) -> int:
        """Device memory that captured steps have or may take; 0 where none is captured."""
        return 0 if self._graphs is None else self._graphs.num_bytes

    @property
    def ahead_graphs(self) -> AheadGraphs | None:
        """Captured steps with drafts that are made and shared out on the device; None where none is captured."""
        return None if self._graphs is None else self._graphs.ahead

    # --- sequences -------------------------------------------------------------------------------------------

    def add_sequence(
        self, slot: int, token_ids: Sequence[int], *, prompt_logprobs: tuple[int, int] | None = None
    ) -> None:
        """Load a sequence's known ids into its slot: see `NewSequence` and `add_sequences`."""
        self.add_sequences([NewSequence(slot, token_ids, prompt_logprobs)])

    def add_sequences(self, sequences: Sequence[NewSequence]) -> None:
        """Load what is known of sequences into their slots, which are free in every step launched from now on."""
        for new in sequences:
            if new.prompt_logprobs is None:
                self._prompt_logprobs.pop(new.slot, None)
            else:
                self._prompt_logprobs[new.slot] = new.prompt_logprobs
        rows = [(new.slot, 0, np.array(new.token_ids, np.int32)) for new in sequences]

        def write() -> None:
            self.tokens.write_rows(rows)
            for new in sequences:
                if new.before is not None:
                    new.before()

        self._check(self._worker.submit(write))

    def write_drafts(
        self, slots: np.ndarray, positions: np.ndarray, token_ids: np.ndarray, lengths: np.ndarray
    ) -> None:
        """Put drafts of R sequences where their next rows verify them.

        Args:
            slots: int [R].
            positions: int [R], where each sequence's first draft goes.
            token_ids: int [R, K].
            lengths: int [R], ids of each row to write.

        Raises:
            ValueError: they do not fit the token buffer.
        """
        if ((positions + lengths) > self.tokens.capacity).any():
            raise ValueError(f"drafts end at {(positions + lengths).max()}; positions end at {self.tokens.capacity}")
        columns = np.arange(token_ids.shape[1])
        inside = columns < lengths[:, None]
        index = self.tokens.flat_index(slots[:, None], positions[:, None] + columns)[inside]
        ids = token_ids[inside].astype(np.int64)
        self._check(self._worker.submit(lambda: self.tokens.scatter(self._put(index), self._put(ids))))

    # --- steps -----------------------------------------------------------------------------------------------

    def launch(self, plan: StepPlan, masks: MaskSource | None = None) -> Flight:
        """Start a step. Block tables are copied before this returns; nothing else is waited for.

        Args:
            plan: from `Scheduler.plan`.
            masks: grammar masks of the draws, needed when the plan has constrained rows.
        """
        groups = self.model.facts.cache_groups
        inputs = plan_inputs(plan, groups, self._tables, self.tokens, self._prompt_logprobs)
        moves, self._moves = self._moves, []
        if plan.ahead is not None:
            assert self.ahead is not None, (
                "a plan for steps that follow each other on the device, and nobody to run them"
            )
            call = self.ahead.launch(plan, inputs, masks, moves)
            return Flight(plan, self._worker.submit(call, waits=masks is not None or bool(inputs.prompts)))
        waits = masks is not None or bool(plan.drafts.any()) or bool(inputs.prompts)
        return Flight(plan, self._worker.submit(lambda: self._run(plan, inputs, masks, moves), waits=waits))

    def move(self, call: Callable[[], Any]) -> Future[Any]:
        """Run a call that moves cached content, after the steps launched so far and before the next.

        The next step fails if the call did: it must not read what was not moved.
        """
        future = self._worker.submit(call)
        self._check(future)
        self._moves.append(future)
        return future

    def collect(self, flight: Flight) -> StepResult:
        """Wait for a step. Raises what the step raised."""
        return flight.future.result().result()

    def close(self) -> None:
        """Stop the worker. May be called again."""
        self._worker.close()

    # --- in the step's thread --------------------------------------------------------------------------------

    def _run(
        self, plan: StepPlan, inputs: StepInputs, masks: MaskSource | None, moves: Sequence[Future[Any]] = ()
    ) -> _Enqueued:
        clock = self.start_clock()
        for done in moves:
            done.result()
        captured = self._graphs.run(inputs) if self._graphs is not None else None
        prompts: tuple[PromptLogprobs, ...] = ()
        if captured is None:
            batch = device_batch(inputs, self.tokens, self.model.options.device)
            hidden = self.model.forward(batch, self.cache)
            prompts = tuple(self.score_prompt(rows, hidden) for rows in inputs.prompts)
            drawn = self._draw(plan, inputs.samples, self.logits(inputs, hidden), masks)
        else:
            drawn = self._draw(plan, inputs.samples, captured.logits, masks, captured.likeliest)
        verified = self._verified(plan, inputs.samples, drawn) if drawn is not None and plan.drafts.any() else None
        ids = Download([] if drawn is None or verified is not None else [drawn.ids], clock)
        logprobs = LogprobsDownload(None if drawn is None else drawn.logprobs)
        clock.stop()
        return _Enqueued(plan, inputs.samples, verified, ids, logprobs, prompts, clock)

    def start_clock(self) -> StepClock:
        """In the step's thread: the clock of a step that begins, behind that of the one before."""
        self._clock = StepClock(self.model.options.device, self._clock)
        return self._clock

    def logits(self, inputs: StepInputs, hidden: torch.Tensor) -> torch.Tensor | None:
        """In the step's thread: logits of the draws, or None without any."""
        samples = inputs.samples
        if not len(samples.slots):
            return None
        whole = len(samples.logits) == len(inputs.host.logit_rows)
        return self.model.logits(hidden if whole else hidden[self._put(samples.logits)])

    def _draw(
        self,
        plan: StepPlan,
        samples: SampleRows,
        logits: torch.Tensor | None,
        masks: MaskSource | None,
        likeliest: torch.Tensor | None = None,
    ) -> SampledTokens | None:
        """Draw, and write the ids where the next step reads them (`likeliest` are there already)."""
        if logits is None:
            return None
        found = masks(samples) if masks is not None else None
        mask_rows, mask_bits = found if found is not None else (None, None)
        rows = SamplingBatch(samples.slots, samples.positions, self.tokens.data, mask_rows, mask_bits, likeliest)
        drawn = self._sample(logits, rows)
        # A verified row must not overwrite its drafts before they are compared.
        if drawn.ids is not likeliest and not plan.drafts.any():
            self.tokens.scatter(self._put(self.tokens.flat_index(samples.slots, samples.positions)), drawn.ids)
        return drawn

    def _verified(self, plan: StepPlan, samples: SampleRows, drawn: SampledTokens) -> tuple[np.ndarray, np.ndarray]:
        """Ids and counts by plan row."""
        found = accept_drafts(plan, samples, drawn.ids, self.tokens)
        return found.token_ids.cpu().numpy().astype(np.int32), found.counts.cpu().numpy().astype(np.int32)

    def score_prompt(self, rows: PromptRows, hidden: torch.Tensor) -> PromptLogprobs:
        """In the step's thread: log-probabilities of prompt tokens. Waits for the device."""
        parts = []
        for start in range(0, len(rows.logits), _PROMPT_LOGITS_ROWS):
            chunk = rows.logits[start : start + _PROMPT_LOGITS_ROWS]
            first = rows.first + start + 1
            successors = self.tokens.data[rows.slot, first : first + len(chunk)].long()
            logits = self.model.logits(hidden[self._put(chunk)])
            found = gather_logprobs(logits, successors, rows.top, np.arange(start, start + len(chunk)))
            parts.append(LogprobsDownload(found).wait())
        return PromptLogprobs(rows.slot, rows.first, _join(parts))

    def _put(self, array: np.ndarray) -> torch.Tensor:
        return upload([array], self.model.options.device)[0]

    def _check(self, future: Future[Any]) -> None:
        if future.done():  # an inline worker: raise here instead of losing the error
            future.result()


def token_columns(max_model_len: int, max_drafts: int) -> int:
    """Positions that the token buffer keeps of a sequence."""
    return max_model_len + 1 + max_drafts


def _make_worker(device: str, threads: int) -> Worker:
    if not threads:
        return InlineWorker()
    return DeviceWorker() if torch.device(device).type == "cuda" else ThreadWorker(threads)


def _join(parts: Sequence[Logprobs | None]) -> Logprobs:
    real = [part for part in parts if part is not None]
    return Logprobs(
        np.concatenate([part.rows for part in real]),
        *(torch.cat([getattr(part, name) for part in real]) for name in ("chosen", "ranks", "top_ids", "top_values")),
    )
