"""Logits of every position of one sequence, through the same scheduler, cache and forward as everything else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from deepinfer_sched import Sequence as Scheduled

from deepinfer_offline.engine.native.batch import device_batch, plan_inputs

if TYPE_CHECKING:
    from deepinfer_sched import Scheduler, StepPlan

    from deepinfer_offline.engine.native.batch import TableSource
    from deepinfer_offline.engine.native.runner import ModelRunner

_ROWS = 256  # positions whose logits exist on the device at once


def score_sequence(
    runner: ModelRunner, scheduler: Scheduler, tables: TableSource, seq_id: int, token_ids: Sequence[int]
) -> np.ndarray:
    """Compute one sequence in chunks while nothing else runs.

    Args:
        runner: idle.
        scheduler: without unfinished sequences.
        tables: `CacheManager.block_table`.
        seq_id: an id that is not in use.
        token_ids: n ids.

    Returns:
        float32 [n, vocab].
    """
    seq = Scheduled(seq_id, list(token_ids), 1, read_cache=False)
    scheduler.add(seq)
    parts: list[np.ndarray] = []
    try:
        while (plan := scheduler.plan()) is not None:
            if plan.admitted:
                runner.add_sequence(seq.slot, seq.tokens, prompt_logprobs=(len(seq.tokens) + 1, 0))
            parts.extend(_score_chunk(runner, tables, plan, seq))
            drawn = plan.samples.astype(np.int32)  # the one token that the scheduler waits for; it is dropped
            scheduler.apply(plan, np.zeros((plan.num_rows, 1), np.int32), drawn, plan.samples)
    finally:
        scheduler.abort(seq_id)
    return np.concatenate(parts)


def _score_chunk(runner: ModelRunner, tables: TableSource, plan: StepPlan, seq: Scheduled) -> list[np.ndarray]:
    wanted = {seq.slot: (len(seq.tokens) + 1, 0)}
    inputs = plan_inputs(plan, runner.model.facts.cache_groups, tables, runner.tokens, wanted)

    def compute() -> list[np.ndarray]:
        with torch.inference_mode():
            batch = device_batch(inputs, runner.tokens, runner.model.options.device)
            hidden = runner.model.forward(batch, runner.cache)
            return [runner.model.logits(part).float().cpu().numpy() for part in hidden.split(_ROWS)]

    return runner._worker.submit(compute).result()
