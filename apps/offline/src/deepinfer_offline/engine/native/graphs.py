"""Captured decode steps: one CUDA graph for each bucket of rows, replayed over buffers that stay where they are.

A step qualifies when every row computes one token and draws the next. Its rows are padded to a bucket; rows that pad read
and write the token buffer's scratch place and block 0 of every cache group, which nobody owns. The graph gathers the input
ids, runs the model, and writes each row's likeliest token where the next step reads it; anything else that a row wants of
its logits happens after the graph, from the logits that it leaves behind.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deepinfer_offline.engine.native.ahead_graphs import AheadGraphs
from deepinfer_offline.engine.native.batch import StepInputs
from deepinfer_offline.engine.native.capture import SPARE_BYTES, Recorder, ShortOfMemoryError
from deepinfer_offline.engine.native.prompt_graphs import PromptGraphs
from deepinfer_offline.engine.native.replayed import Replayed
from deepinfer_offline.engine.native.step_buffers import StepBuffers
from deepinfer_offline.engine.native.step_memory import StepMemory
from deepinfer_offline.engine.native.tokens import TokenBuffer
from deepinfer_offline.models.base import (
    Capturable,
    CapturesBlocks,
    CapturesPrompts,
    DraftsBlocks,
    Model,
    ModelFacts,
    ModelOptions,
)
from deepinfer_offline.ops.cuda.support import kernels

_LOG = logging.getLogger(__name__)
_SMALL = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_STEP = 128  # rows between buckets above the small ones: at most 2 % to a third of the rows are padding
_WARM_UPS = 2  # eager steps before a capture: kernels compile and libraries choose in the first


def row_buckets(most: int) -> list[int]:
    """Sizes of batches that are captured, ascending; the last one holds `most` rows."""
    sizes = [size for size in _SMALL if size < most]
    sizes += list(range(_SMALL[-1] + _STEP, most, _STEP))
    return [*sizes, most]


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    buffers: StepBuffers
    logits: torch.Tensor
    likeliest: torch.Tensor


class DecodeGraphs:
    """Captures decode steps when they first occur, and replays them. Used by the thread that runs the steps.

    Args:
        model: takes no decision from the host in a captured step.
        cache: of the model.
        tokens: the token buffer.
        recorder: records graphs.
        memory: where they find their inputs.
    """

    def __init__(self, model: Model, cache: Any, tokens: TokenBuffer, recorder: Recorder, memory: StepMemory) -> None:
        assert isinstance(model, Capturable), f"{type(model).__name__} cannot be captured"
        self._model, self._cache, self._tokens = model, cache, tokens
        self._limits = model
        self._buckets = row_buckets(model.options.max_running)
        self._captured: dict[tuple[int, int], _Captured | None] = {}  # None: there is no room for it
        self._met: Counter[tuple[int, int]] = Counter()  # how often a key occurred that is not captured yet
        self._refused = False  # whether it was said that some steps are too large
        self._recorder, self._memory = recorder, memory
        self.latest: _Captured | None = None

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(rows, longest sequence) of what is captured."""
        return sorted(key for key, captured in self._captured.items() if captured is not None)

    def run(self, inputs: StepInputs) -> Replayed | None:
        """Enqueue the step; None when it is not one that a graph can serve."""
        host = inputs.host
        rows = host.num_rows
        if not rows or rows != host.num_decodes or len(inputs.samples.slots) != rows or len(host.logit_rows) != rows:
            return None
        if host.prefills.any() or host.keep_all.any() or rows > self._buckets[-1]:
            return None
        key = self._key(rows, int(host.seq_lens.max()))
        if key is None:
            return None
        if key not in self._captured:
            self._try(key)
        captured = self._captured.get(key)
        if captured is None:
            return None
        self.latest = captured
        captured.buffers.fill(inputs)
        captured.graph.replay()
        return Replayed(captured.logits[:rows], captured.likeliest[:rows])

    def _key(self, rows: int, longest: int) -> tuple[int, int] | None:
        """Rows and positions of the captured step that serves one like this; None where there is none."""
        size = self._buckets[bisect_left(self._buckets, rows)]
        limit = self._limits.capture_limit(size, longest)
        if limit is not None:
            return size, limit
        if not self._refused:
            _LOG.warning(
                "decode steps as large as %d rows of up to %d positions are not captured and take longer; "
                "--max-running bounds their rows, --max-model-len their positions",
                rows,
                longest,
            )
        self._refused = True
        return None

    # --- capture ---------------------------------------------------------------------------------------------

    def _try(self, key: tuple[int, int]) -> None:
        """Capture a key's step, unless the device is short of memory just now: then the step itself may run or say so.

        The second, fourth, eighth, ... time that the key occurs it is tried again.
        """
        self._met[key] += 1
        if self._met[key] & (self._met[key] - 1):
            return
        try:
            self._captured[key] = self._capture(*key)
        except ShortOfMemoryError as error:
            _LOG.warning("a decode step of %d rows is not captured yet and takes longer: %s", key[0], error)

    def _capture(self, size: int, limit: int) -> _Captured | None:
        """Capture a step of `size` rows of at most `limit` positions; None if there is no room for it."""
        start = time.perf_counter()
        buffers = StepBuffers.of(self._memory, size, limit)
        buffers.clear()
        recorded = self._recorder.record(lambda: self._step(buffers), warm_ups=_WARM_UPS)
        if recorded is None:
            return None
        graph, (logits, likeliest) = recorded
        _LOG.info("captured a decode step of %d rows in %.2f s", size, time.perf_counter() - start)
        return _Captured(graph, buffers, logits, likeliest)

    def _step(self, buffers: StepBuffers) -> tuple[torch.Tensor, torch.Tensor]:
        """What is captured: from the input buffers to logits and the token buffer."""
        batch, target = buffers.batch(self._tokens)
        logits = self._model.logits(self._model.forward(batch, self._cache))
        return logits, kernels().argmax(logits, flat=self._tokens.flat, where=target)


class StepGraphs:
    """All captured steps of a model.

    Args:
        model: can be captured.
        cache: of the model.
        tokens: the token buffer.

    Attributes:
        num_bytes: device memory that captured steps have, or may take yet.
        decodes: of rows of one token.
        prompts: with prompts; None for a model whose steps with prompts are not captured.
        ahead: with drafts that are made and shared out on the device; None for a model without a draft.
    """

    def __init__(self, model: Model, cache: Any, tokens: TokenBuffer) -> None:
        options, groups = model.options, model.facts.cache_groups
        rows = step_rows(type(model), options.max_running)
        memory = StepMemory(groups, rows, options.max_model_len, options.device)
        branch = model.facts.graph_branch_bytes
        recorder = Recorder(options.device, model.facts.graph_bytes - branch, branch)
        room = 0 if recorder.full else recorder.limit
        self.num_bytes = room + StepMemory.num_bytes(groups, rows, options.max_model_len)
        self.decodes = DecodeGraphs(model, cache, tokens, recorder, memory)
        takes_prompts = isinstance(model, CapturesPrompts) and model.captures_prompts
        self.prompts = PromptGraphs(model, cache, tokens, recorder, memory) if takes_prompts else None
        takes_drafts = takes_prompts and isinstance(model, CapturesBlocks) and isinstance(model, DraftsBlocks)
        self.ahead: AheadGraphs | None = None
        if takes_drafts and model.draft_width:
            row_sizes = row_buckets(options.max_running)
            most = min(options.max_running * (1 + model.draft_width), max(options.max_running, options.max_step_tokens))
            sizes = sorted({*row_sizes, *row_buckets(most)})
            self.ahead = AheadGraphs(model, cache, tokens, recorder, memory, row_sizes, sizes)

    def run(self, inputs: StepInputs) -> Replayed | None:
        """Enqueue the step; None when it is not one that a graph can serve."""
        found = self.decodes.run(inputs)
        return self.prompts.run(inputs) if found is None and self.prompts is not None else found


def make_graphs(model: Model, cache: Any, tokens: TokenBuffer) -> StepGraphs | None:
    """Graphs for a model that can be captured on its device, else None."""
    if not can_capture(type(model), model.facts, model.options.device):
        return None
    assert isinstance(model, Capturable)
    if model.capture_limit(1, 1) is None:
        return None
    # Inputs of captured steps are int32, places in the token buffer too.
    return None if tokens.scratch > np.iinfo(np.int32).max else StepGraphs(model, cache, tokens)


def can_capture(kind: type[Model], facts: ModelFacts, device: str) -> bool:
    """Whether steps of such a model are captured there: the kernels are needed, and room that the model says."""
    if torch.device(device).type != "cuda" or not facts.graph_bytes:
        return False
    return hasattr(kind, "capture_limit") and kernels() is not None


def planned_bytes(kind: type[Model], facts: ModelFacts, options: ModelOptions) -> int:
    """Device memory that `StepGraphs` of such a model will have, before it is loaded."""
    if not can_capture(kind, facts, options.device):
        return 0
    rows = step_rows(kind, options.max_running)
    return facts.graph_bytes + SPARE_BYTES + StepMemory.num_bytes(facts.cache_groups, rows, options.max_model_len)


def step_rows(kind: type[Model], max_running: int) -> int:
    """Most rows of a captured step: those of one token and others are padded each by themselves."""
    return max_running * (2 if hasattr(kind, "captures_prompts") else 1)
