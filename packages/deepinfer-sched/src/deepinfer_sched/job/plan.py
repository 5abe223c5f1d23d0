"""Order a whole job so that shared prefixes are computed once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from deepinfer_sched.errors import SchedConfigError
from deepinfer_sched.job.hashing import TokenIds, chain_ids, chain_names
from deepinfer_sched.job.order import depth_first
from deepinfer_sched.job.tree import PrefixTree, build_tree

_BATCH_TOKENS = 4_000_000  # tokens hashed at once: the only ones that are held
_GROW = 4_000_000  # names: 32 MB


@dataclass(frozen=True, slots=True)
class JobPlan:
    """The order of a job (or of one window of it).

    Attributes:
        order: int64 [n], request indices in the order to run. Outputs are put back into input order by the caller.
        tree: what the requests share.
        block_size: tokens of a block.
        tokens: int64 [n], prompt tokens of each request.
    """

    order: np.ndarray
    tree: PrefixTree
    block_size: int
    tokens: np.ndarray

    @property
    def bound(self) -> float:
        """Share of all full blocks that an endless cache would find."""
        total = self.tree.total_blocks
        return 1 - self.tree.distinct_blocks / total if total else 0.0

    @property
    def saved_tokens(self) -> int:
        """Prompt tokens that an endless cache would not compute."""
        return (self.tree.total_blocks - self.tree.distinct_blocks) * self.block_size

    def shared_prefixes(self, limit: int = 10) -> list[SharedPrefix]:
        """The prefixes that save most, best first."""
        tree = self.tree
        saved = (tree.counts - 1) * tree.blocks
        best = np.argsort(-saved, kind="stable")[:limit]
        return [
            SharedPrefix(
                tokens=int(tree.depths[segment] + tree.blocks[segment]) * self.block_size,
                requests=int(tree.counts[segment]),
                saved_tokens=int(saved[segment]) * self.block_size,
                example=int(tree.firsts[segment]),
            )
            for segment in best.tolist()
            if saved[segment] > 0
        ]


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A prefix of `tokens` tokens that `requests` requests start with; `example` is the first of them.

    `saved_tokens` counts what is saved by its last part alone, the part that a longer-known prefix does not cover.
    """

    tokens: int
    requests: int
    saved_tokens: int
    example: int


def plan_job(
    requests: Iterable[TokenIds], *, block_size: int = 16, outputs: Sequence[int] | np.ndarray | None = None
) -> JobPlan:
    """Order a job depth-first over its prefix tree.

    Args:
        requests: token ids of each request, in input order. Read once; only block names are kept (8 bytes a block),
            so a generator keeps memory small. Integer arrays are fastest.
        block_size: tokens of a cache block.
        outputs: expected output tokens of each request (for instance `max_tokens`); all equal when left out.

    Raises:
        SchedConfigError: `block_size` below 1, or `outputs` of another length than `requests`.
    """
    if block_size < 1:
        raise SchedConfigError(f"block_size {block_size} must be at least 1")
    names, counts, tokens = _name_blocks(requests, block_size)
    return _plan(names, counts, tokens, block_size, outputs)


def plan_blocks(
    requests: Sequence[Sequence[int]], *, block_size: int, outputs: Sequence[int] | np.ndarray | None = None
) -> JobPlan:
    """Like `plan_job` for requests that are given as ids of their blocks (a trace)."""
    counts = np.array([len(blocks) for blocks in requests], np.int64)
    flat = np.fromiter((block for blocks in requests for block in blocks), np.int64, int(counts.sum())).view(np.uint64)
    return _plan(chain_ids(flat, counts), counts, counts * block_size, block_size, outputs)


def plan_windows(requests: Iterable[TokenIds], window: int, *, block_size: int = 16) -> Iterator[tuple[int, JobPlan]]:
    """Plan a job that is too large to be planned at once, `window` requests at a time.

    Yields:
        (index of the window's first request, plan of the window; its `order` counts from that index).
    """
    if window < 1:
        raise SchedConfigError(f"window {window} must be at least 1")
    source, first = iter(requests), 0
    while True:
        plan = plan_job(islice(source, window), block_size=block_size)
        if not len(plan.order):
            return
        yield first, plan
        first += len(plan.order)


def _plan(
    names: np.ndarray,
    counts: np.ndarray,
    tokens: np.ndarray,
    block_size: int,
    outputs: Sequence[int] | np.ndarray | None,
) -> JobPlan:
    expected = np.zeros(len(counts), np.int64) if outputs is None else np.asarray(outputs, np.int64)
    if len(expected) != len(counts):
        raise SchedConfigError(f"{len(expected)} outputs are given for {len(counts)} requests")
    tree = build_tree(names, counts)
    return JobPlan(depth_first(tree, expected), tree, block_size, tokens)


def _name_blocks(requests: Iterable[TokenIds], block_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Names of all blocks, blocks and tokens of each request."""
    names, size = np.zeros(0, np.uint64), 0
    counts: list[np.ndarray] = []
    lengths: list[int] = []
    for batch in _batches(requests):
        lengths.extend(len(tokens) for tokens in batch)
        piece, blocks = chain_names(batch, block_size)
        counts.append(blocks)
        if size + len(piece) > len(names):  # realloc moves large arrays without a second copy in memory
            names.resize(size + len(piece) + _GROW, refcheck=False)
        names[size : size + len(piece)] = piece
        size += len(piece)
    return names[:size], np.concatenate(counts) if counts else np.zeros(0, np.int64), np.array(lengths, np.int64)


def _batches(requests: Iterable[TokenIds]) -> Iterator[list[TokenIds]]:
    batch: list[TokenIds] = []
    size = 0
    for tokens in requests:
        batch.append(tokens)
        size += len(tokens)
        if size >= _BATCH_TOKENS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
