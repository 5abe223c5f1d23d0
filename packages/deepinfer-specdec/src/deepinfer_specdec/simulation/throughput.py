"""Expected tokens per second of verification policies on measured cost curves, with requests that differ from each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer_specdec.draft import Draft
from deepinfer_specdec.scheduling.admission import admit
from deepinfer_specdec.scheduling.budget import (
    EDGE,
    StepLoad,
    early_stop_budget,
    expected_budget,
    expected_tokens,
    lookahead_budget,
)
from deepinfer_specdec.scheduling.choice import choose
from deepinfer_specdec.scheduling.cost import CostCurve
from deepinfer_specdec.scheduling.costs import ahead_costs
from deepinfer_specdec.scheduling.planner import VerificationPlanner

# DeepSeek-V4-Flash-0731, TP4 on B300, 8192 tokens of context; digitised from figure 2 of the vLLM blog of 2026-08-14.
VERIFY_TOKENS = (1, 8, 16, 32, 64, 96, 128, 152, 176, 256, 304, 352, 512, 672, 687, 1024)
VERIFY_MS = (5.1, 5.4, 5.6, 6.3, 7.9, 8.8, 9.4, 11.3, 10.4, 11.3, 13.9, 13.5, 15.0, 17.8, 16.0, 20.6)
EAGER_TOKENS = (1025, 1536, 4096, 8192, 16384)  # beyond the largest graph; the first point extends the eager line back
EAGER_MS = (98.2, 104.0, 133.0, 136.0, 235.0)
DRAFT_REQUESTS = (1, 8, 16, 32, 64, 128, 192, 256)
DRAFT_MS = (0.88, 1.07, 1.32, 1.61, 2.27, 3.14, 4.31, 5.38)


def v4_flash_verify() -> CostCurve:
    """The verification curve, with graphs at 1, 2, 4, every 8 tokens to 256, every 16 to 1024, and the measured points."""
    graphs = sorted({1, 2, 4, *range(8, 257, 8), *range(272, 1025, 16), *VERIFY_TOKENS})
    ms = np.interp(graphs, VERIFY_TOKENS, VERIFY_MS)
    return CostCurve([*graphs, *EAGER_TOKENS], np.array([*ms, *EAGER_MS]) * 1e-3, padded_to=1024)


def v4_flash_draft() -> CostCurve:
    """The drafting curve; like the figure it is read between points."""
    return CostCurve(DRAFT_REQUESTS, np.array(DRAFT_MS) * 1e-3)


@dataclass(frozen=True, slots=True)
class Workload:
    """R requests that run all the time; confidences are calibrated, so expected tokens follow from them.

    Attributes:
        rows: requests running.
        mean_logit: logit of the conditional acceptance of an average request (0.95: 0.72, survival 0.1 at column 7).
        between: spread (logits) between requests, fixed for a request's life.
        within: spread from block to block, correlated by `memory`; half of it again per column.
        kinds: offsets (logits) of kinds of requests, in equal shares: (2, -2) mixes code with chat.
        memory: correlation of a request's difficulty from one block to the next.
        life: steps that a request lives, on average.
        tokens: of a request, which lives until they are out, its kind being the next in turn; 0 for `life` and a drawn kind. As
            in a job, whose answers end by their tokens: what speeds code up ends it sooner, and chat has the places most of
            the time.
    """

    rows: int
    mean_logit: float = 0.95
    between: float = 0.0
    within: float = 0.0
    kinds: tuple[float, ...] = (0.0,)
    memory: float = 0.8
    life: int = 150
    tokens: int = 0


class _Requests:
    def __init__(self, load: Workload, width: int, rng: np.random.Generator) -> None:
        self._load, self._width, self._rng = load, width, rng
        self._born = 0
        self._level = np.array([self._fresh() for _ in range(load.rows)])
        self._drift = rng.normal(size=load.rows) * load.within
        self._left = np.full(load.rows, float(load.tokens)) * rng.random(load.rows) if load.tokens else np.empty(0)
        self.replaced = np.zeros(load.rows, dtype=bool)

    def emit(self, tokens: NDArray[np.float64]) -> None:
        """Take in what each row emitted."""
        if self._load.tokens:
            self._left -= tokens

    def _fresh(self) -> float:
        number = self._born if self._load.tokens else self._rng.integers(len(self._load.kinds))
        self._born += 1
        kind = self._load.kinds[number % len(self._load.kinds)]
        return self._load.mean_logit + kind + self._rng.normal() * self._load.between

    def next_block(self) -> NDArray[np.float32]:
        """Confidences [R, K] of the next block; `replaced` says which rows are new requests."""
        load, rng = self._load, self._rng
        self.replaced = self._left <= 0.0 if load.tokens else rng.random(load.rows) < 1.0 / load.life
        for row in np.flatnonzero(self.replaced):
            self._level[row] = self._fresh()
            if load.tokens:
                self._left[row] += load.tokens
        noise = rng.normal(size=load.rows) * load.within
        self._drift = load.memory * self._drift + np.sqrt(1.0 - load.memory**2) * noise
        columns = rng.normal(size=(load.rows, self._width)) * (load.within / 2)
        logits = (self._level + self._drift)[:, None] + columns
        return (1.0 / (1.0 + np.exp(-logits))).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Decision:
    """Draft time and lengths of one simulated step."""

    draft_seconds: float
    lengths: NDArray[np.int32]


Simulated = Callable[[int, Draft, NDArray[np.bool_]], Decision]


def fixed_length(length: int, draft: CostCurve) -> Simulated:
    """Every request verifies `length` drafts; 0 does not draft at all."""

    def decide(_step: int, block: Draft, _replaced: NDArray[np.bool_]) -> Decision:
        seconds = float(draft.seconds(block.rows)) if length else 0.0
        return Decision(seconds, np.full(block.rows, length, dtype=np.int32))

    return decide


def paper_early_stop(verify: CostCurve, draft: CostCurve) -> Simulated:
    """Algorithm 1 of the paper on live confidences."""

    def decide(_step: int, block: Draft, _replaced: NDArray[np.bool_]) -> Decision:
        seconds = float(draft.seconds(block.rows))
        survivals = block.survivals()
        budget = early_stop_budget(survivals, StepLoad(block.rows, draft_seconds=seconds), verify)
        return Decision(seconds, admit(survivals, block.counts, budget))

    return decide


def paper_production(verify: CostCurve, draft: CostCurve) -> Simulated:
    """The paper's production rule: global argmax on the block before the one that is verified (confidences "two steps prior" to
    the verifying step; new requests count as certain), live top-K.
    """
    before: list[NDArray[np.float32]] = []

    def decide(_step: int, block: Draft, replaced: NDArray[np.bool_]) -> Decision:
        seconds = float(draft.seconds(block.rows))
        stale = before[0] if before else np.ones_like(block.confidences)
        stale[replaced] = 1.0
        budget = expected_budget(expected_tokens(stale), StepLoad(block.rows, draft_seconds=seconds), verify)
        before[:] = [block.survivals()]
        return Decision(seconds, admit(before[0], block.counts, budget))

    return decide


def planned(verify: CostCurve, draft: CostCurve, rows: int, width: int) -> Simulated:
    """DeepInfer's rule for asynchronous loops, by the planner of its engines. The block of `step` is verified in step + 1."""
    planner, slots = VerificationPlanner(rows, width), np.arange(rows)

    def decide(step: int, block: Draft, replaced: NDArray[np.bool_]) -> Decision:
        for slot in np.flatnonzero(replaced).tolist():
            planner.begin(slot, step)
        drafting = float(draft.seconds(rows))
        budget = planner.budget(step + 1, slots, verify.span(rows, rows * width + 1) + drafting)
        survivals = block.survivals()
        planner.record(step, slots, survivals)
        return Decision(drafting, admit(survivals, block.counts, budget))

    return decide


def learned(verify: CostCurve, draft: CostCurve, rows: int, width: int) -> Simulated:
    """`planned` with prices that are not known but learned from the steps themselves, by the native engine's planner and prices
    for a loop ahead. The engine captures the curve's graphs before it serves. As in the loop, what a step took is known when
    the next but one is planned.
    """
    planner, slots = VerificationPlanner(rows, width, EDGE), np.arange(rows)
    costs = ahead_costs(builds=False, graphs=verify.graphs)
    flying: list[tuple[int, float]] = []

    def decide(step: int, block: Draft, replaced: NDArray[np.bool_]) -> Decision:
        for slot in np.flatnonzero(replaced).tolist():
            planner.begin(slot, step)
        budget = planner.budget(step + 1, slots, costs.drafting(rows, rows * width)) if costs.known else 0
        if flying:
            costs.observe(rows, *flying.pop())
        survivals = block.survivals()
        planner.record(step, slots, survivals)
        drafting = float(draft.seconds(rows))
        flying.append((budget, float(verify.seconds(rows + budget)) + drafting))
        return Decision(drafting, admit(survivals, block.counts, budget))

    return decide


def live_lookahead(verify: CostCurve, draft: CostCurve) -> Simulated:
    """DeepInfer's rule for synchronous loops: early stop that looks past jags with the help of the last 50 blocks' mean."""
    mean: list[NDArray[np.float64]] = []

    def decide(step: int, block: Draft, _replaced: NDArray[np.bool_]) -> Decision:
        seconds = float(draft.seconds(block.rows))
        survivals = block.survivals()
        forecast = mean[0] if mean else expected_tokens(survivals * 0 + 1)
        budget = lookahead_budget(survivals, forecast, StepLoad(block.rows, draft_seconds=seconds), verify)
        mean[:] = [forecast + (expected_tokens(survivals) - forecast) / min(step + 1, 50)]
        return Decision(seconds, admit(survivals, block.counts, budget))

    return decide


def live_choice(verify: CostCurve, draft: CostCurve) -> Simulated:
    """DeepInfer's rule for synchronous loops under coupled verification, where the output does not depend on what is
    verified: the best of all budgets for the current block. For drafts that pass through the native engine's host.
    """

    def decide(_step: int, block: Draft, _replaced: NDArray[np.bool_]) -> Decision:
        seconds = float(draft.seconds(block.rows))
        prices = verify.span(block.rows, block.rows * block.width + 1) + seconds
        return Decision(seconds, choose(block.survivals(), block.counts, prices).lengths)

    return decide


def _most_kept(survivals: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """Most expected drafts kept [rows + 1, rows * K + 1] by rows drafted and drafts verified, -inf where there are not so
    many; and the length [rows, rows + 1, rows * K + 1] that each row in turn has in it.
    """
    rows, width = survivals.shape
    kept = np.full((rows + 1, rows * width + 1), -np.inf)
    kept[0, 0] = 0.0
    lengths = np.zeros((rows, *kept.shape), dtype=np.int32)
    for row, gains in enumerate(np.cumsum(survivals, axis=1)):
        before = kept.copy()
        for length, gain in enumerate(gains, start=1):
            longer = before[:-1, :-length] + gain
            better = longer > kept[1:, length:]
            kept[1:, length:][better] = longer[better]
            lengths[row, 1:, length:][better] = length
    return kept, lengths


def _foreseen(
    verify: CostCurve,
    draft: CostCurve,
    worth: Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.float64]],
) -> Simulated:
    """Rows to draft for and drafts to verify for the highest `worth(tokens, seconds)`, with the confidences of the block
    itself, those of rows that are not drafted included.
    """

    def decide(_step: int, block: Draft, _replaced: NDArray[np.bool_]) -> Decision:
        rows = block.rows
        kept, choices = _most_kept(block.survivals().astype(np.float64))
        drafting = np.append(0.0, [float(draft.seconds(count)) for count in range(1, rows + 1)])
        values = worth(rows + kept, verify.span(rows, kept.shape[1]) + drafting[:, None])
        count, budget = (int(i) for i in np.unravel_index(values.argmax(), values.shape))
        seconds, lengths = float(drafting[count]), np.zeros(rows, dtype=np.int32)
        for row in reversed(range(rows)):
            lengths[row] = choices[row, count, budget]
            count, budget = count - int(lengths[row] > 0), budget - int(lengths[row])
        return Decision(seconds, lengths)

    return decide


def clairvoyant(verify: CostCurve, draft: CostCurve, rate: float) -> Simulated:
    """No policy but a bound: what is best for the most tokens less `rate` times the seconds, everything known beforehand.

    Where what is verified does not change what comes next (requests that live by steps), no policy has a higher rate over all
    steps than this one with that very `rate` (the optimum of a ratio of sums, Dinkelbach 1967); from a lower rate, the rate
    that comes out is between the two. It hurries through steps in which little is to be had, which pays only since such requests
    leave by steps: answers that leave by their tokens stay longer then.
    """
    return _foreseen(verify, draft, lambda tokens, seconds: tokens - rate * seconds)


def foreseeing(verify: CostCurve, draft: CostCurve) -> Simulated:
    """No policy but what the rule of this package, the most expected tokens per second of each step, would make if it knew the
    confidences of all rows before it drafts.
    """
    return _foreseen(verify, draft, lambda tokens, seconds: tokens / seconds)


def tokens_per_second(
    decide: Simulated, load: Workload, verify: CostCurve, width: int = 7, steps: int = 400, seed: int = 0
) -> float:
    """Expected tokens per second of a policy over `steps` steps. The same seed gives every policy the same requests, unless
    they end by their tokens.
    """
    requests = _Requests(load, width, np.random.default_rng(seed))
    ids = np.zeros((load.rows, width), dtype=np.int32)
    counts = np.full(load.rows, width, dtype=np.int32)
    tokens = seconds = 0.0
    for step in range(steps):
        block = Draft(ids, counts, requests.next_block())
        decision = decide(step, block, requests.replaced)
        emitted = 1.0 + np.where(np.arange(width) < decision.lengths[:, None], block.survivals(), 0.0).sum(axis=1)
        requests.emit(emitted)
        tokens += float(emitted.sum())
        seconds += float(verify.seconds(load.rows + int(decision.lengths.sum()))) + decision.draft_seconds
    return tokens / seconds
