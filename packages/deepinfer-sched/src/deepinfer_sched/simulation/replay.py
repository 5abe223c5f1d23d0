"""A whole job through the real scheduler and a real cache, on a device that only a cost model knows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from deepinfer_sched.cache import Cache
from deepinfer_sched.config import SchedConfig
from deepinfer_sched.job.hashing import TokenIds
from deepinfer_sched.scheduler import Scheduler
from deepinfer_sched.sequence import Sequence
from deepinfer_sched.simulation.cost import CostModel
from deepinfer_sched.step import StepPlan


@dataclass(slots=True)
class SimulationReport:
    """What a job would have cost.

    Attributes:
        requests: requests that finished.
        steps: forwards.
        seconds: time of all steps under the cost model.
        prompt_tokens: tokens of all prompts.
        cached_tokens: prompt tokens found in the cache at the first admission.
        computed_tokens: prompt tokens that were computed, replays and recomputation after preemption included.
        generated_tokens: tokens made.
        preemptions: how often a sequence lost its slot.
        peak_pages: the most pages that were in use at once.
        peak_running: the most sequences that ran at once.
    """

    requests: int = 0
    steps: int = 0
    seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    peak_pages: int = 0
    peak_running: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that was found; 0.0 for an empty job."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def simulate(
    requests: Iterable[tuple[TokenIds, int]], cache: Cache, config: SchedConfig, cost: CostModel | None = None
) -> SimulationReport:
    """Run a job, in the order in which it is given, without a device.

    Compare policies by calling it once for each: another order of `requests`, another eviction or window strategy of
    `cache`, other limits in `config`.

    Args:
        requests: (prompt token ids, tokens to generate). Read as far ahead as the scheduler looks, not held.
        cache: an empty cache, e.g. `deepinfer_cache.CacheManager`.
        config: the scheduler's limits.
        cost: what steps take; defaults stand for a large model on one accelerator.

    Raises:
        SequenceError: a request that the limits can never hold.
    """
    return _Simulation(requests, cache, config, cost or CostModel()).run()


def trace_requests(
    blocks: Iterable[Iterable[int]], tokens: Iterable[int], outputs: Iterable[int], block_size: int
) -> Iterator[tuple[np.ndarray, int]]:
    """Requests of a trace that names blocks only: every id becomes `block_size` tokens that spell it.

    Args:
        blocks: ids of each request's blocks.
        tokens: prompt tokens of each request; the last block is cut to fit.
        outputs: tokens to generate.
        block_size: tokens of a block.
    """
    for ids, length, output in zip(blocks, tokens, outputs, strict=True):
        names = np.fromiter(ids, np.int64)
        spelled = np.repeat(names & 0xFFFFFFFF, block_size).reshape(-1, block_size)
        spelled[:, -1] = names >> 32
        yield spelled.ravel()[:length], output


class _Simulation:
    def __init__(
        self, requests: Iterable[tuple[TokenIds, int]], cache: Cache, config: SchedConfig, cost: CostModel
    ) -> None:
        self._source = iter(requests)
        self._scheduler = Scheduler(config, cache)
        self._config = config
        self._cost = cost
        self._report = SimulationReport()
        self._queue = config.max_running + config.lookahead  # waiting sequences that are kept ready
        self._added = 0

    def run(self) -> SimulationReport:
        scheduler, report = self._scheduler, self._report
        flights: deque[StepPlan] = deque()
        self._refill()
        while scheduler.has_unfinished:
            plan = scheduler.plan()
            if plan is not None:
                self._count(plan)
                flights.append(plan)
            if plan is None or len(flights) == self._config.max_in_flight:
                done = flights.popleft()
                ids = np.full((done.num_rows, 1), done.step % 1000)  # any ids: answers are never shared
                for seq in scheduler.apply(done, ids, done.samples.astype(np.int64)):
                    report.requests += 1
                    report.cached_tokens += seq.cached_tokens
                    report.generated_tokens += seq.num_generated
                    report.preemptions += seq.preemptions
                self._refill()
        return report

    def _refill(self) -> None:
        for prompt, output in islice(self._source, max(0, self._queue - self._scheduler.num_waiting)):
            self._scheduler.add(Sequence(self._added, list(map(int, prompt)), max(output, 1)))
            self._report.prompt_tokens += len(prompt)
            self._added += 1

    def _count(self, plan: StepPlan) -> None:
        report, cache = self._report, self._scheduler.cache
        report.steps += 1
        report.seconds += self._cost.seconds(plan)
        report.computed_tokens += int(plan.counts[plan.prefills].sum())
        report.peak_pages = max(report.peak_pages, cache.num_pages - cache.available_pages)
        report.peak_running = max(report.peak_running, self._scheduler.num_running)
