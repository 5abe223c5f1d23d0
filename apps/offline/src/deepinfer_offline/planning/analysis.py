"""From a file to a report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from deepinfer_sched import plan_blocks, plan_job

from deepinfer_offline.engine.options import EngineOptions
from deepinfer_offline.job.errors import JobError
from deepinfer_offline.job.source import Source
from deepinfer_offline.planning.advice import SAMPLE, advise
from deepinfer_offline.planning.report import PlanReport, default_sizes, make_report
from deepinfer_offline.planning.trace import read_trace

TRACE_BLOCK = 512  # tokens that one id of the public traces stands for


def analyse_trace(path: Path, block_size: int | None, cache_blocks: Sequence[int]) -> PlanReport:
    """Report on a trace, whose ids are blocks of `block_size` tokens already."""
    trace = read_trace(path)
    plan = plan_blocks(trace.blocks, block_size=block_size or TRACE_BLOCK, outputs=trace.outputs)
    if any(trace.tokens):
        plan = replace(plan, tokens=np.array(trace.tokens, np.int64))
    report = make_report(plan, cache_blocks or default_sizes(plan))
    return replace(report, advice=advise(report, plan, ()))


def analyse_file(name: str, options: EngineOptions, cache_blocks: Sequence[int]) -> PlanReport:
    """Report on a batch file. Its prompts are tokenised and cut into blocks as a run with these options would; none is kept."""
    from deepinfer_offline.planning.model import find_model  # these import torch, which a trace does not need
    from deepinfer_offline.planning.prompts import PromptReader

    model = find_model(options)
    tokenizer = model.tokenizer
    source = Source(name)
    try:
        reader = PromptReader(source, tokenizer)
        sample = Sample()
        plan = plan_job(sample.watch(reader), block_size=model.block_size)
    finally:
        source.close()
    if not len(plan.order):
        raise JobError(f"{name} has no request that a run would accept; {reader.first_fault or 'it is empty'}")
    report = replace(make_report(plan, cache_blocks or default_sizes(plan)), engine=model.engine)
    advice = advise(report, plan, sample.prompts, tokenizer.decode if tokenizer is not None else None)
    if reader.skipped:
        lines = "1 line is" if reader.skipped == 1 else f"{reader.skipped:,} lines are"
        advice = (f"{lines} left out, because a run would refuse them; {reader.first_fault}.", *advice)
    return replace(report, advice=advice)


class Sample:
    """Keeps some prompts of a stream, evenly spread: every k-th one, k doubling when there are too many."""

    def __init__(self, size: int = SAMPLE) -> None:
        self.prompts: list[np.ndarray] = []
        self._size = size
        self._every = 1

    def watch(self, prompts: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """Pass a stream on, keeping some of it."""
        for place, tokens in enumerate(prompts):
            if place % self._every == 0:
                self.prompts.append(tokens)
                if len(self.prompts) > self._size:
                    self.prompts = self.prompts[::2]
                    self._every *= 2
            yield tokens
