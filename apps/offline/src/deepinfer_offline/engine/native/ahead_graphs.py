"""Captured steps with drafts that no host knows: one CUDA graph for each bucket of tokens and rows, from where the rows begin to
the hidden states of all their tokens.

Sharing the drafts out before, and logits and what comes after them, are not captured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import torch

from deepinfer_offline.engine.native.ahead_buffers import AheadBucket, AheadBuffers
from deepinfer_offline.engine.native.ahead_rows import AheadState, DrawingRows
from deepinfer_offline.engine.native.batch import StepInputs
from deepinfer_offline.engine.native.capture import Recorder
from deepinfer_offline.engine.native.draft_graphs import DraftGraphs
from deepinfer_offline.engine.native.repeated import Repeated
from deepinfer_offline.engine.native.step_memory import StepMemory
from deepinfer_offline.engine.native.tokens import TokenBuffer
from deepinfer_offline.engine.native.whole_steps import WholeSteps
from deepinfer_offline.models.base import CapturesBlocks, DraftsBlocks, Model

_MOST = 64  # graphs


class AheadGraphs:
    """Captures such steps when a bucket occurs again, and replays them. Used by the thread that runs the steps.

    Args:
        model: takes no decision from the host in a step whose lengths are upper bounds.
        cache: of the model.
        tokens: the token buffer.
        recorder: records graphs.
        memory: where they find their inputs.
        rows: sizes of batches, ascending; the last one holds all that run at once.
        sizes: the same of tokens, all of `rows` among them.

    Attributes:
        sizes: tokens that steps are padded to.
        state: what steps leave of each slot.
        drafts: drafts behind these steps.
        whole: steps that are captured as a whole.
    """

    def __init__(
        self,
        model: Model,
        cache: Any,
        tokens: TokenBuffer,
        recorder: Recorder,
        memory: StepMemory,
        rows: Sequence[int],
        sizes: Sequence[int],
    ) -> None:
        assert isinstance(model, DraftsBlocks), f"{type(model).__name__} does not draft"
        assert isinstance(model, CapturesBlocks), f"drafts of {type(model).__name__} cannot be captured"
        assert set(rows) <= set(sizes), "rows that pad would not fit the tokens of a step that verifies nothing"
        self._model, self._cache, self._tokens, self._width = model, cache, tokens, model.draft_width
        self._rows, self.sizes = rows, tuple(sizes)
        self.state = AheadState.of(rows[-1], model.draft_width, model.options.device)
        self.drafts = DraftGraphs(model, cache, tokens, recorder, memory, rows)
        self.whole = WholeSteps(model, cache, tokens, recorder, memory, self.state, rows, sizes)
        self._repeated = Repeated(recorder, lambda b: AheadBuffers.of(memory, b), self._forward, _MOST)

    @property
    def tries(self) -> int:
        """Captures so far, of any kind, those that found no memory among them."""
        return self._repeated.tries + self.drafts.tries + self.whole.tries

    @property
    def firsts(self) -> int:
        """See `Repeated.firsts`; of any kind."""
        return self._repeated.firsts + self.drafts.firsts + self.whole.firsts

    @property
    def captured(self) -> list[AheadBucket]:
        """What is captured."""
        return sorted(self._repeated.captured)

    def run(self, inputs: StepInputs, rows: DrawingRows, budget: int) -> torch.Tensor | None:
        """Enqueue a step, unless no graph can serve it.

        Args:
            inputs, rows: of the step.
            budget: drafts that it verifies.

        Returns:
            Hidden states of the step's tokens, [rows + budget, hidden], which the next captured step or draft overwrites.
        """
        host = inputs.host
        tokens = host.num_rows + budget
        if not host.num_rows or host.prefills.any() or tokens > self.sizes[-1]:
            return None
        size = self._rows[bisect_left(self._rows, host.num_rows)]
        padded = self.sizes[bisect_left(self.sizes, tokens)]
        bucket = AheadBucket(padded, size, min(1 + self._width, padded) if budget else 1)
        buffers = self._repeated.buffers(bucket)
        buffers.fill(inputs, rows)
        return self._repeated.run(bucket)[:tokens]

    def _forward(self, buffers: AheadBuffers) -> torch.Tensor:
        """What is captured."""
        return self._model.forward(buffers.batch(self._tokens), self._cache)
