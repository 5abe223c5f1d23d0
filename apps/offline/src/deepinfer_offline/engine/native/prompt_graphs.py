"""Captured steps with prompts: one CUDA graph for each bucket of tokens and rows, from the input ids to the hidden states of
the rows that draw.

A step without one costs the host some ten launches a layer, which is more time than its kernels take. Tokens are padded to a
bucket, rows of one token and other rows each to another. Logits and what comes after them are not captured: they are wide,
and few rows draw.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import torch

from deepinfer_offline.engine.native.batch import StepInputs
from deepinfer_offline.engine.native.capture import Recorder
from deepinfer_offline.engine.native.prompt_buffers import PromptBucket, PromptBuffers
from deepinfer_offline.engine.native.repeated import Repeated
from deepinfer_offline.engine.native.replayed import Replayed
from deepinfer_offline.engine.native.step_memory import StepMemory
from deepinfer_offline.engine.native.tokens import TokenBuffer
from deepinfer_offline.models.base import HostBatch, Model
from deepinfer_offline.ops.cuda.support import kernels

_LEAST = 256  # tokens of the smallest bucket
_OCTAVE = 8  # buckets between a power of two and the next: at most an eighth of the tokens are padding
_DECODES = (0, 16, 64, 256)  # empty rows cost a block that ends at once
_ROW_TOKENS = 64  # prompts of a bucket have so many tokens on average, or else there may be as many as can run
_MOST = 256  # graphs


def token_buckets(most: int) -> list[int]:
    """Sizes of steps that are captured, ascending; the last one holds `most` tokens."""
    sizes, octave = [], _LEAST
    while octave < most:
        sizes += [size for size in range(octave, 2 * octave, octave // _OCTAVE) if size < most]
        octave *= 2
    return [*sizes, most]


class PromptBuckets:
    """Which bucket a step belongs to.

    Args:
        max_running: sequences that run at once.
        max_step_tokens: tokens of one step.
    """

    def __init__(self, max_running: int, max_step_tokens: int) -> None:
        self._running = max_running
        self._tokens = token_buckets(max_step_tokens)
        self._decodes = [*(size for size in _DECODES if size < max_running), max_running]

    def find(self, host: HostBatch) -> PromptBucket | None:
        """The bucket of a step with rows of prompts; None where it has more rows than fit its tokens."""
        tokens, prompts = int(host.query_starts[-1]), host.num_rows - host.num_decodes
        decodes = self._decodes[bisect_left(self._decodes, host.num_decodes)]
        size = self._tokens[bisect_left(self._tokens, tokens)]
        some = min(max(size, 16 * _ROW_TOKENS) // _ROW_TOKENS, self._running)
        rows = some if prompts <= some else self._running
        # More tokens than rows draw, or the model would take all tokens for drawing ones; and long rows beside the short.
        wanted = max(tokens, decodes + max(rows, 16) + 1)
        if wanted > self._tokens[-1]:
            return None
        return PromptBucket(self._tokens[bisect_left(self._tokens, wanted)], decodes, rows)


class PromptGraphs:
    """Captures steps with prompts when a bucket occurs again, and replays them. Used by the thread that runs the steps.

    Args:
        model: takes no decision from the host in such a step.
        cache: of the model.
        tokens: the token buffer.
        recorder: records graphs.
        memory: where they find their inputs; it holds twice `max_running` rows.
    """

    def __init__(self, model: Model, cache: Any, tokens: TokenBuffer, recorder: Recorder, memory: StepMemory) -> None:
        options = model.options
        self._model, self._cache, self._tokens = model, cache, tokens
        self._buckets = PromptBuckets(options.max_running, options.max_step_tokens)
        self._repeated = Repeated(recorder, lambda b: PromptBuffers.of(memory, b), self._forward, _MOST)

    @property
    def sizes(self) -> list[PromptBucket]:
        """What is captured."""
        return sorted(self._repeated.captured)

    def run(self, inputs: StepInputs) -> Replayed | None:
        """Enqueue the step; None when it is not one that a graph can serve."""
        host, draws = inputs.host, len(inputs.samples.slots)
        first = host.num_decodes
        if first == host.num_rows or not host.prefills[first:].all() or len(host.logit_rows) != draws:
            return None
        bucket = None if host.keep_all.any() else self._buckets.find(host)
        if bucket is None:
            return None
        buffers = self._repeated.buffers(bucket)
        buffers.fill(inputs, self._tokens)
        return self._drawn(buffers, self._repeated.run(bucket), draws)

    def _forward(self, buffers: PromptBuffers) -> torch.Tensor:
        """What is captured: from the input buffers to the hidden states of all rows that may draw."""
        return self._model.forward(buffers.batch(self._tokens), self._cache)

    def _drawn(self, buffers: PromptBuffers, hidden: torch.Tensor, draws: int) -> Replayed:
        if not draws:
            return Replayed(None, None)
        logits = self._model.logits(hidden[:draws])
        where = buffers.fields["targets"][:draws]
        return Replayed(logits, kernels().argmax(logits, flat=self._tokens.flat, where=where))
