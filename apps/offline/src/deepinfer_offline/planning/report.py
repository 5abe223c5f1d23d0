"""Hit rates of a job by cache size and policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from deepinfer_sched import JobPlan, SharedPrefix, replay_lru, replay_next_use


@dataclass(frozen=True, slots=True)
class SizeReport:
    """Hit rates, as fractions of the job's blocks, with a cache of `cache_blocks` blocks.

    Attributes:
        cache_blocks: size of the cache.
        arrival_lru: requests as they come, textbook LRU.
        planned_lru: in planned order, LRU as this engine evicts: of a finished request's blocks the last one first.
        planned_next_use: in planned order, the block whose next use is farthest away first.
    """

    cache_blocks: int
    arrival_lru: float
    planned_lru: float
    planned_next_use: float


@dataclass(frozen=True, slots=True)
class PlanReport:
    """How cache-friendly a job is.

    Attributes:
        requests: requests of the job.
        blocks: cache blocks that their prompts fill, shared ones counted as often as they are used.
        block_size: tokens of a block.
        bound: hit rate of an endless cache: no order and no policy does better.
        sizes: hit rates by cache size, smallest first.
        prompt_tokens: prompt tokens of the job.
        shared: the prefixes that save most.
        advice: sentences for the user.
        engine: whose blocks they are; empty for a trace.
    """

    requests: int
    blocks: int
    block_size: int
    bound: float
    sizes: tuple[SizeReport, ...]
    prompt_tokens: int
    shared: tuple[SharedPrefix, ...] = ()
    advice: tuple[str, ...] = field(default_factory=tuple)
    engine: str = ""

    def to_json(self) -> dict[str, Any]:
        """The report's numbers; rates are fractions."""
        return {
            "requests": self.requests,
            "blocks": self.blocks,
            "bound": self.bound,
            "sizes": [
                {
                    "cache_blocks": size.cache_blocks,
                    "arrival_lru": size.arrival_lru,
                    "planned_lru": size.planned_lru,
                    "planned_next_use": size.planned_next_use,
                }
                for size in self.sizes
            ],
        }


def make_report(plan: JobPlan, cache_blocks: Sequence[int], advice: Sequence[str] = ()) -> PlanReport:
    """Replay the job in arrival order and in planned order, over caches of each size."""
    tree, arrival = plan.tree, np.arange(len(plan.order))
    total = tree.total_blocks or 1
    sizes = tuple(
        SizeReport(
            cache_blocks=size,
            arrival_lru=replay_lru(tree, arrival, size) / total,
            planned_lru=replay_lru(tree, plan.order, size, heads_last=True) / total,
            planned_next_use=replay_next_use(tree, plan.order, size) / total,
        )
        for size in sorted(set(cache_blocks))
    )
    return PlanReport(
        requests=len(plan.order),
        blocks=tree.total_blocks,
        block_size=plan.block_size,
        bound=plan.bound,
        sizes=sizes,
        prompt_tokens=int(plan.tokens.sum()),
        shared=tuple(plan.shared_prefixes()),
        advice=tuple(advice),
    )


def default_sizes(plan: JobPlan) -> list[int]:
    """Cache sizes worth looking at: powers of four around the job's distinct blocks, at least one request's."""
    distinct = max(plan.tree.distinct_blocks, 1)
    longest = max(int(plan.tokens.max(initial=0)) // plan.block_size, 1)
    size = 1
    while size < 2 * longest:
        size *= 4
    sizes = [size]
    while sizes[-1] < distinct and len(sizes) < 8:
        sizes.append(sizes[-1] * 4)
    return sizes
