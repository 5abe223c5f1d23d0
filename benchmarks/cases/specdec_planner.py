"""What speculation's scheduler takes of a step, at 256 requests x 7 drafts. Bar: 300 us for each, by the median.

The rule alone, at prices that were learned before (`deepinfer_specdec`):

ahead               a block's confidences scaled and recorded, then the next budget; prices go on being learned
ahead graphs        the same where steps are padded to captured graphs, those of the curve, and priced by graph
synchronous         prices, survivals corrected by what was kept, budget and lengths in one sort, what became of them taken in
vllm                inside vLLM: confidences recorded, then the budget by its profile's curve

All that the native engine runs in its loop's thread for speculation: the engine's own `Speculation`, left to itself, between a
scheduler and a runner that do nothing:

engine ahead        `Speculation.ahead` and its budget, then `landed`: with the real `AheadDrafts` and `DSparkDrafter`, which
                    settles blocks and refits its calibration (once in 128 steps: see the mean)
engine ahead graphs the same where steps are padded to graphs, which the engine's own are not on any device so far
engine synchronous  `Speculation.propose` and `landed`, with a drafter that has its drafts ready: what drafters of token ids take
                    for themselves is not in it

The model, the draft and the scheduler's own planning are not timed. The budget that is printed is the median of the timed steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from deepinfer_offline.engine.native.ahead_drafts import AheadDrafts
from deepinfer_offline.engine.native.dspark import DSparkDrafter
from deepinfer_offline.engine.native.results import DraftedRows, StepResult
from deepinfer_offline.engine.native.speculation import Speculation
from deepinfer_sched import Ahead, StepPlan
from deepinfer_sched.slots import SlotState
from deepinfer_specdec import Draft, VerificationPlanner, admit
from deepinfer_specdec.scheduling.budget import EDGE, StepLoad
from deepinfer_specdec.scheduling.calibration import TemperatureScaling
from deepinfer_specdec.scheduling.choice import choose, round_sizes
from deepinfer_specdec.scheduling.costs import StepCosts, ahead_costs
from deepinfer_specdec.scheduling.hopes import Hopes
from deepinfer_specdec.scheduling.worth import token_worth
from deepinfer_specdec.simulation.throughput import v4_flash_draft, v4_flash_verify

BAR = 300.0  # microseconds, at 256 x 7
BLOCKS = 64  # different ones, in turn
WARM, TIMED = 300, 600  # steps
VERIFY = v4_flash_verify()

Step = Callable[[int], tuple[float, int]]
"""Number of a step -> seconds that were spent on speculation, drafts that it verifies."""


@dataclass(frozen=True, slots=True)
class Times:
    """Of the timed steps: microseconds, and the median of their budgets."""

    median_us: float
    p90_us: float
    mean_us: float
    budget: int


def times(step: Step) -> Times:
    """Run the steps; the first are not counted."""
    made = [step(number) for number in range(1, 1 + WARM + TIMED)][WARM:]
    spent = sorted(seconds * 1e6 for seconds, _ in made)
    budget = int(statistics.median(budget for _, budget in made))
    return Times(statistics.median(spent), spent[int(0.9 * TIMED)], statistics.fmean(spent), budget)


def timed(call: Callable[[int], int]) -> Step:
    """A step that is one call."""

    def step(number: int) -> tuple[float, int]:
        begin = time.perf_counter()
        budget = call(number)
        return time.perf_counter() - begin, budget

    return step


# --- the rule ------------------------------------------------------------------------------------------------


def learned(costs: StepCosts, rows: int, width: int) -> StepCosts:
    """The prices after steps without drafts and with many numbers of them, three times each."""
    costs.observe_ahead(rows, float(VERIFY.seconds(rows)))
    for budget in 3 * [0, *range(16, rows * width, 48)]:
        costs.observe(rows, budget, float(VERIFY.seconds(rows + budget)))
    return costs


def ahead(rows: int, width: int, logits: np.ndarray, graphs: Sequence[int] = ()) -> Step:
    """`deepinfer_offline.engine.native.ahead_drafts`: what it calls when a step has landed and the next one is planned."""
    planner, slots = VerificationPlanner(rows, width, EDGE), np.arange(rows)
    costs = learned(ahead_costs(builds=False, graphs=graphs), rows, width)
    scaling, most = TemperatureScaling.identity(width), np.full(rows, width, np.int32)

    def step(number: int) -> int:
        planner.record(number, slots, scaling.survival(logits[number % BLOCKS]))
        seconds = costs.drafting(rows, rows * width)
        budget = planner.budget(number + 2, slots, seconds, counts=most)
        costs.observe(rows, budget, float(VERIFY.seconds(rows + budget)))
        return budget

    return timed(step)


def ahead_graphs(rows: int, width: int, logits: np.ndarray) -> Step:
    """The same for steps that are padded to graphs."""
    return ahead(rows, width, logits, VERIFY.graphs.tolist())


def synchronous(rows: int, width: int, logits: np.ndarray) -> Step:
    """`deepinfer_offline.engine.native.speculation`: what it calls between two steps, but for the drafter."""
    costs, hopes = learned(StepCosts(), rows, width), Hopes()
    ids, counts = np.zeros((rows, width), np.int32), np.full(rows, width, np.int32)
    confidences = (1.0 / (1.0 + np.exp(-logits))).astype(np.float32)
    left = np.linspace(10, 200, rows)

    def step(number: int) -> int:
        survivals = Draft(ids, counts, confidences[number % BLOCKS]).survivals()
        worth = token_worth(left, costs.fixed_share(rows))
        seconds = costs.synchronous(rows, rows * width)
        choice = choose(hopes.believed(survivals) * worth[:, None], counts, seconds, EDGE, round_sizes)
        hopes.settle(survivals, worth, choice.lengths, choice.lengths // 2)
        costs.observe(rows, choice.budget, float(VERIFY.seconds(rows + choice.budget)))
        return choice.budget

    return timed(step)


def vllm(rows: int, width: int, logits: np.ndarray) -> Step:
    """`deepinfer_specdec.adapters.vllm.verification`: what it calls on the host."""
    planner, slots = VerificationPlanner(rows, width), np.arange(rows)
    confidences = (1.0 / (1.0 + np.exp(-logits))).astype(np.float32)
    counts, drafting = np.full(rows, width, np.int32), float(v4_flash_draft().seconds(rows))

    def step(number: int) -> int:
        planner.record(number, slots, np.cumprod(confidences[number % BLOCKS], axis=1))
        load = StepLoad(rows, draft_seconds=drafting, limit=rows * width)
        return planner.budget(number + 2, slots, load.seconds(VERIFY, load.limit), rows, counts)

    return timed(step)


# --- the engine's loop ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Loop:
    """Speculation between a scheduler and a runner that do nothing: the rows are always the same, and none ever ends.

    Attributes:
        rows, width: of every step.
        in_flight: steps that run when one lands.
    """

    rows: int
    width: int
    in_flight: int
    state: SlotState = field(init=False)
    answers: dict[int, Any] = field(init=False)
    scheduler: Any = field(init=False)
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        rows, state = self.rows, SlotState(self.rows)
        state.seq_ids[:], state.length[:], state.limit[:] = range(rows), 20, 1 << 30
        sequences = [SimpleNamespace(seq_id=i, slot=i, tokens=[0] * 20, num_prompt=8) for i in range(rows)]
        self.state, self.rng = state, np.random.default_rng(0)
        self.answers = {i: SimpleNamespace(seq=sequences[i], matcher=None, drafts=[]) for i in range(rows)}
        self.scheduler = SimpleNamespace(
            config=SimpleNamespace(max_running=rows),
            state=state,
            num_running=rows,
            num_waiting=0,
            in_flight=self.in_flight,
            awaits_masks=False,
            sequence=sequences.__getitem__,
            propose_rows=state.drafts.__setitem__,
        )

    def plan(self, number: int, drafts: np.ndarray, ahead: Ahead | None) -> StepPlan:
        """A step in which all rows decode and verify up to `drafts` [R]."""
        rows, none, zeros = self.rows, np.zeros(self.rows, bool), np.zeros(self.rows, np.int32)
        slots = np.arange(rows, dtype=np.int32)
        counts, starts = drafts + 1, self.state.length - 1
        return StepPlan(
            number, np.arange(rows), slots, starts, counts, drafts, ~none, none, none, zeros, zeros, zeros, ahead=ahead
        )

    def land(self, plan: StepPlan, verified: np.ndarray, block: np.ndarray, made: DraftedRows | None) -> StepResult:
        """What the step gave: up to 3 of the drafts that each row verified of its `block` [R, K], and another token."""
        kept = np.minimum(self.rng.integers(0, 4, self.rows), verified)
        ids = np.full((self.rows, self.width + 1), -1, np.int32)
        ids[:, : self.width] = np.where(np.arange(self.width) < kept[:, None], block, -1)
        ids[np.arange(self.rows), kept] = 99
        self.state.length += (kept + 1).astype(np.int32)
        for answer, row, count in zip(self.answers.values(), ids.tolist(), kept.tolist(), strict=True):
            answer.seq.tokens.extend(row[: count + 1])
        seconds = float(VERIFY.seconds(self.rows + int(verified.sum())))
        return StepResult(plan, ids, kept + 1, None, np.zeros(0, np.int64), (), seconds, verified, made)


def engine_ahead(rows: int, width: int, logits: np.ndarray, graphs: Sequence[int] = ()) -> Step:
    """`NativeEngine` with a model that drafts in its steps."""
    loop = Loop(rows, width, in_flight=1)
    facts = SimpleNamespace(cache_groups=[SimpleNamespace(name="kv", block_size=16)])
    model = SimpleNamespace(facts=facts, options=SimpleNamespace(device="cpu"), draft_group="kv", draft_width=width)
    drafter = DSparkDrafter(SimpleNamespace(model=model), loop.scheduler, *3 * [None])  # type: ignore[arg-type]
    planned = AheadDrafts(drafter, loop.scheduler, EDGE, builds=False, graphs=graphs)
    speculation = Speculation(drafter, loop.scheduler, SimpleNamespace(), ahead=planned)  # type: ignore[arg-type]
    learned(planned.costs, rows, width)
    planned.plain.observe_ahead(rows, float(VERIFY.seconds(rows)))
    speculation._switches.meet(rows).try_on()  # as a forecast does that promises a gain
    slots, most, none = np.arange(rows, dtype=np.int32), np.full(rows, width, np.int32), np.zeros(rows, np.int32)
    flying = [loop.plan(0, none, None)]
    block, sure = np.zeros((rows, width), np.int64), np.zeros((rows, width), np.float32)

    def step(number: int) -> tuple[float, int]:
        nonlocal block, sure
        begin = time.perf_counter()
        offer = speculation.ahead()
        ahead = offer.share(number, slots, most, rows * width) if offer is not None else None
        between = time.perf_counter()
        flying.append(loop.plan(number, none if ahead is None else most, ahead))
        plan = flying.pop(0)
        verified, made = none, None
        if plan.ahead is not None:
            verified = admit(drafter.calibration.scaling.survival(sure), most, plan.ahead.budget)
        if plan.ahead is not None and plan.ahead.width:
            drafted = loop.rng.integers(0, 50, (rows, width))
            made = DraftedRows(np.arange(rows), drafted, logits[number % BLOCKS])
        result = loop.land(plan, verified, block, made)
        if made is not None:
            block, sure = made.token_ids, made.confidence
        again = time.perf_counter()
        speculation._landed = again - result.seconds  # so long ago, by the clock of the model that is not there
        speculation.landed(result, loop.answers)
        return time.perf_counter() - again + between - begin, int(verified.sum())

    return step


def engine_ahead_graphs(rows: int, width: int, logits: np.ndarray) -> Step:
    """The same for steps that are padded to graphs."""
    return engine_ahead(rows, width, logits, VERIFY.graphs.tolist())


class Ready:
    """A drafter whose drafts are there before it is asked.

    Args:
        width: drafts of a row.
        confidences: float32 [n, R, K], of its blocks in turn.
    """

    name = "ready"

    def __init__(self, width: int, confidences: np.ndarray) -> None:
        self.max_draft = width
        rows = confidences.shape[1]
        counts, self.block = np.full(rows, width, np.int32), np.zeros((rows, width), np.int32)
        self._drafts, self._turn = [Draft(self.block, counts, each) for each in confidences], 0

    def begin(self, sequence: int, token_ids: Any) -> None:
        """Its drafts follow from nothing."""

    extend = begin

    def end(self, sequence: int) -> None:
        """No sequence ends."""

    def propose(self, sequences: Any, limits: Any = None, floor: float = 0.0) -> Draft:
        """The next one."""
        self._turn += 1
        return self._drafts[self._turn % len(self._drafts)]


def engine_synchronous(rows: int, width: int, logits: np.ndarray) -> Step:
    """`NativeEngine` with drafts that pass through the host."""
    loop = Loop(rows, width, in_flight=0)
    drafter = Ready(width, (1.0 / (1.0 + np.exp(-logits))).astype(np.float32))
    runner = SimpleNamespace(write_drafts=lambda *_: None)
    speculation = Speculation(drafter, loop.scheduler, runner)  # type: ignore[arg-type]
    learned(speculation._costs, rows, width)
    speculation._switches.meet(rows).try_on()  # as a forecast does that promises a gain

    def step(number: int) -> tuple[float, int]:
        begin = time.perf_counter()
        speculation.propose(loop.answers)
        between = time.perf_counter()
        lengths = loop.state.drafts.copy()
        loop.state.drafts[:] = 0
        result = loop.land(loop.plan(number, lengths, None), lengths, drafter.block, None)
        again = time.perf_counter()
        speculation._landed = again - result.seconds  # so long ago, by the clock of the model that is not there
        speculation.landed(result, loop.answers)
        return time.perf_counter() - again + between - begin, int(lengths.sum())

    return step


def measure(rows: int, width: int) -> dict[str, Times]:
    """Times of a step. Each step drafts other confidences."""
    logits = np.random.default_rng(0).normal(0.9, 1.0, (BLOCKS, rows, width)).astype(np.float32)
    made = (ahead, ahead_graphs, synchronous, vllm, engine_ahead, engine_ahead_graphs, engine_synchronous)
    return {make.__name__.replace("_", " "): times(make(rows, width, logits)) for make in made}


def run(argv: list[str]) -> int:
    """Print the table, or one JSON object; 1 if a step takes more than the bar."""
    parser = argparse.ArgumentParser(
        prog="specdec-planner", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--width", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    result = measure(args.rows, args.width)
    if args.json:
        print(json.dumps({name: asdict(found) for name, found in result.items()}))
    else:
        print(f"{args.rows} requests x {args.width} drafts, microseconds per step; bar {BAR:.0f} for the median")
        for name, found in result.items():
            print(
                f"  {name:19} median {found.median_us:6.1f}   p90 {found.p90_us:6.1f}   mean {found.mean_us:6.1f}"
                f"   budget {found.budget:4}"
            )
    return 0 if max(found.median_us for found in result.values()) <= BAR else 1


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
