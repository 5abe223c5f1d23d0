"""Steps that verify drafts ahead of the host: the answers are those of the model alone, whatever runs when.

`toy_engine.check` computes what an answer must be without an engine: one token at a time, from the model's own distribution.
"""

from __future__ import annotations

import copy
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from deepinfer_offline.engine.base import Request
from deepinfer_offline.engine.native import ahead_step
from deepinfer_offline.engine.native.ahead_drafts import AheadDrafts
from deepinfer_offline.engine.native.engine import NativeEngine
from deepinfer_sched.slots import SlotState
from deepinfer_specdec.scheduling.budget import expected_tokens
from torch.utils._python_dispatch import TorchDispatchMode
from toy_drafts import WIDTH, BoundsToy, DraftingToy, make_drafting_engine
from toy_engine import ask, check, random_request, run


class Cycle:
    """A grammar that allows one token at a time, and its matcher."""

    notes = ()
    is_terminated = is_accepting = False

    def __init__(self) -> None:
        self.count = 0

    def matcher(self) -> Cycle:
        return Cycle()

    def mask(self) -> None:
        """The next mask can always be made."""

    def accept(self, tokens: list[int]) -> int:
        right = tokens == [self.count * 7 % 94]
        self.count += right
        return int(right)

    def forced_tokens(self) -> list[int]:
        return [(self.count + place) * 7 % 94 for place in range(3)]

    def allows(self, tokens: list[int]) -> int:
        expected = [(self.count + place) * 7 % 94 for place in range(len(tokens))]
        return next((place for place, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b), len(tokens))

    def fill_mask(self, row: np.ndarray) -> None:
        self._fill(row, self.count)

    def fill_draft_masks(self, drafts: list[int], rows: np.ndarray) -> int:
        for place, row in enumerate(rows):
            self._fill(row, self.count + place)
        return len(drafts)

    def _fill(self, row: np.ndarray, count: int) -> None:
        token = count * 7 % 94
        row[:] = 0
        row.view(np.uint32)[token // 32] = np.uint32(1 << (token % 32))


def count_steps(engine: NativeEngine) -> Counter[str]:
    """How the steps of an engine are planned, from now on."""
    seen: Counter[str] = Counter()
    runner = engine._parts.runner
    launch = runner.launch

    def counted(plan: Any, masks: Any = None) -> Any:
        kind = "ahead" if plan.ahead is not None else "host" if plan.drafts.any() else "plain"
        seen[kind] += 1
        seen["follows"] += int(plan.slack.any())
        seen["drafts"] += plan.ahead.budget if plan.ahead is not None else 0
        return launch(plan, masks)

    runner.launch = counted  # type: ignore[method-assign]
    return seen


def random_job(rng: random.Random, grammars: float = 0.0) -> list[Request]:
    prefixes = [[rng.randrange(94) for _ in range(30)] for _ in range(2)]
    requests = [random_request(rng, f"r{place}", prefixes) for place in range(rng.randrange(2, 9))]
    bound = [
        replace(ask(f"g{place}", "abc"[place:], max_tokens=rng.randrange(3, 12)), grammar=Cycle())
        for place in range(3)
        if rng.random() < grammars
    ]
    mixed = requests + bound
    rng.shuffle(mixed)
    return mixed


def check_all(engine: NativeEngine, requests: list[Request], on_step: Callable[[int], Any] | None = None) -> None:
    outputs = run(engine, requests, on_step)
    for request in requests:
        if request.grammar is None:
            check(request, outputs[request.request_id])
        else:
            said = outputs[request.request_id].outputs[0].token_ids
            assert said == [place * 7 % 94 for place in range(request.params.max_tokens or 0)]
    assert engine._parts.cache.stats().used_pages == 0


def sizes(rng: random.Random) -> dict[str, Any]:
    return {
        "pages": rng.choice([34, 60, 200]),
        "running": rng.choice([2, 8]),
        "budget": rng.choice([12, 24, 64]),
        "prefix": rng.random() < 0.7,
    }


@pytest.mark.parametrize("kind", [DraftingToy, BoundsToy])
def test_answers_are_those_of_the_model_alone(kind: type[DraftingToy]) -> None:
    """Greedy, sampled, penalised, biased and stopped answers, n > 1, log-probabilities; chunks, hits, and room that runs out."""
    seen: Counter[str] = Counter()
    for job in range(25):
        rng = random.Random(job)
        engine = make_drafting_engine(kind=kind, **sizes(rng))
        engine._parts.speculation.force(rng.choice([1, 3, WIDTH]))
        steps = count_steps(engine)
        check_all(engine, random_job(rng))
        seen += steps
        stats = engine.stats()
        seen["accepted"] += stats.accepted_tokens
        seen["rejected"] += stats.drafted_tokens - stats.accepted_tokens
        assert stats.drafted_tokens == steps["drafts"]
    assert seen["ahead"] and not seen["host"] and not seen["plain"]
    assert seen["follows"] > 0.5 * seen["ahead"], "most steps are to follow tokens that are not known"
    assert min(seen["accepted"], seen["rejected"]) > 200


def test_speculation_goes_on_and_off_and_meets_grammars_and_preemptions() -> None:
    """Every way from one kind of step to another, in the middle of answers."""
    seen: Counter[str] = Counter()
    for job in range(40):
        rng = random.Random(job)
        engine = make_drafting_engine(**sizes(rng))
        speculation: Any = engine._parts.speculation
        speculation.force(WIDTH)
        steps = count_steps(engine)

        def disturb(step: int, rng: random.Random = rng, engine: Any = engine, speculation: Any = speculation) -> None:
            if rng.random() < 0.1:
                speculation._forced = not speculation._forced
                if not speculation.synchronous:
                    for answer in engine._answers.values():
                        engine._parts.scheduler.propose(answer.seq.seq_id, 0)
            running = engine._parts.scheduler._running.sequences
            if running and rng.random() < 0.1:
                engine._parts.scheduler.preempt(rng.choice(running).seq_id)

        check_all(engine, random_job(rng, grammars=0.3), disturb)
        seen += steps
        seen["preempted"] += engine.stats().preemptions
    assert min(seen["ahead"], seen["host"], seen["plain"], seen["follows"], seen["preempted"]) > 50


def test_aborted_requests_leave_the_others_alone() -> None:
    for job in range(12):
        rng = random.Random(job)
        engine = make_drafting_engine(**sizes(rng))
        engine._parts.speculation.force(WIDTH)
        requests = random_job(rng)
        gone = {request.request_id for request in requests if rng.random() < 0.4}
        left = sorted(gone)

        def drop(step: int, left: list[str] = left, engine: NativeEngine = engine) -> None:
            if left and step % 3 == 0:
                engine.abort(left.pop())

        outputs = run(engine, requests, drop)
        for request in requests:
            if request.request_id in outputs:
                check(request, outputs[request.request_id])
            else:
                assert request.request_id in gone
        assert engine._parts.cache.stats().used_pages == 0


def test_without_the_loop_that_runs_ahead_drafts_pass_through_the_host() -> None:
    engine = make_drafting_engine(ahead=1)
    engine._parts.speculation.force(WIDTH)
    steps = count_steps(engine)
    check_all(engine, random_job(random.Random(1)))
    assert steps["host"] and not steps["ahead"]


# --- what a budget may look at --------------------------------------------------------------------------------


class Watch:
    """Computes every budget's forecast twice: as it is, and with garbage for what the step before drafted, where that is known.

    Args:
        drafts: what plans the steps.
    """

    def __init__(self, drafts: AheadDrafts) -> None:
        self.forecasts = self.fresh = 0
        self._landed, self._forecast = drafts.landed, drafts.forecast
        self._relay: Any = drafts._relay
        self._record, self._reset = self._relay.record, self._relay.reset
        self._step, self._twin = 0, copy.deepcopy(self._relay)
        self._rng = np.random.default_rng(0)
        drafts.landed, drafts.forecast = self.landed, self.forecast  # type: ignore[method-assign]
        self._relay.record, self._relay.reset = self.record, self.reset

    def landed(self, result: Any, *rest: Any) -> None:
        self._step = result.plan.step
        self._landed(result, *rest)

    def record(self, stamp: int, slots: np.ndarray, survivals: np.ndarray) -> None:
        self._twin = object.__new__(type(self._relay))
        numbers = {name: value for name, value in vars(self._relay).items() if name not in ("record", "reset")}
        vars(self._twin).update(copy.deepcopy(numbers))
        self._twin.record(stamp, slots, self._rng.random(survivals.shape).astype(np.float32))
        self._record(stamp, slots, survivals)

    def reset(self, slot: int) -> None:
        self._twin.reset(slot)
        self._reset(slot)

    def forecast(self, step: int, slots: np.ndarray) -> np.ndarray:
        found = self._forecast(step, slots)
        self.forecasts += 1
        if self._step > step - 2:
            self.fresh += 1
            other = self._twin.forecast(step, slots)
            assert np.array_equal(found, expected_tokens(other.survivals, other.weights)), "a budget saw a fresh block"
        return found


def budgeted_engine() -> tuple[NativeEngine, Watch]:
    """Two rows that draft as the budget says, at costs that make drafts worth their while."""
    engine = make_drafting_engine(running=2)
    speculation: Any = engine._parts.speculation
    speculation.force()
    for rows in (1, 2):
        speculation._costs.observe(rows, 0, 1e-3)
    return engine, Watch(speculation._ahead)


def job_of_eight() -> list[Request]:
    rng = random.Random(0)
    return [ask(f"r{place}", "word"[place % 4 :], max_tokens=rng.randrange(10, 40)) for place in range(8)]


def wait_sometimes(engine: NativeEngine, step: int) -> None:
    """Take the results of all steps, as the loop has to when no row can go on: then the newest block is known."""
    if step % 3 == 0:
        engine._land_all()


def test_budgets_come_from_blocks_two_steps_old() -> None:
    """Whatever the newest block says, and even when the loop had to wait for it, the budget is the same."""
    engine, watch = budgeted_engine()
    steps = count_steps(engine)
    check_all(engine, job_of_eight(), lambda step: wait_sometimes(engine, step))
    assert watch.forecasts > 30
    assert watch.fresh > 5, "the loop never waited: the test shows nothing"
    assert 0 < steps["drafts"] < WIDTH * 2 * steps["ahead"]


def test_the_watch_sees_a_fresh_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are stamped a step too early are found out."""
    landed = AheadDrafts.landed

    def early(self: AheadDrafts, result: Any, *rest: Any) -> None:
        landed(self, replace(result, plan=replace(result.plan, step=result.plan.step - 1)), *rest)

    monkeypatch.setattr(AheadDrafts, "landed", early)
    engine, _ = budgeted_engine()
    with pytest.raises(AssertionError, match="a budget saw a fresh block"):
        run(engine, job_of_eight(), lambda step: wait_sometimes(engine, step))


# --- nothing waits for the device -----------------------------------------------------------------------------

# What a tensor's own methods, and operations that decide a shape from values, wait for.
READS = ("numpy", "tolist", "cpu", "item", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__array__")


WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero", "repeat_interleave")


class NoWaits(TorchDispatchMode):
    """Operations whose result has a shape that values decide, or that is a number of the host's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert not name.startswith(WAITING), f"the step's thread reads a tensor with {name}"
        if name.startswith("index") and len(args) > 1 and isinstance(args[1], list | tuple):
            kinds = [index.dtype for index in args[1] if index is not None]
            assert torch.bool not in kinds, "the step's thread reads a tensor with a mask as an index"
        return func(*args, **(kwargs or {}))


@contextmanager
def no_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """While a step that was planned ahead runs in its thread, what a host would wait for is an error."""
    inside, seen = threading.local(), Counter[str]()
    run_step = ahead_step.AheadSteps._run

    def guarded(name: str) -> Any:
        read = getattr(torch.Tensor, name)

        def method(self: torch.Tensor, *args: Any, **named: Any) -> Any:
            seen["elsewhere"] += 1
            assert not getattr(inside, "step", False), f"the step's thread reads a tensor with {name}"
            return read(self, *args, **named)

        return method

    def watched(self: Any, *args: Any) -> Any:
        inside.step = True
        seen["steps"] += 1
        try:
            with NoWaits():
                return run_step(self, *args)
        finally:
            inside.step = False

    with monkeypatch.context() as patch:
        for name in READS:
            patch.setattr(torch.Tensor, name, guarded(name))
        patch.setattr(ahead_step.AheadSteps, "_run", watched)
        yield seen


def test_a_step_reads_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that takes lengths from the device: between two launches the host reads no tensor, for no kind of request."""
    with no_reads(monkeypatch) as seen:
        for job in range(6):
            rng = random.Random(job)
            engine = make_drafting_engine(kind=BoundsToy, **sizes(rng))
            engine._parts.speculation.force(WIDTH)
            check_all(engine, random_job(rng))
    assert seen["steps"] > 50
    assert seen["elsewhere"] > 50


@pytest.mark.parametrize(
    "read",
    [lambda x: x[x > 0], lambda x: torch.nonzero(x), lambda x: x.max().item(), lambda x: torch.zeros(int(x[0]) + 1)],
)
def test_waits_are_noticed(read: Any) -> None:
    with NoWaits(), pytest.raises(AssertionError, match="reads a tensor"):
        read(torch.arange(3))


def test_reads_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy that looks at the host's batch reads positions: the guard must see it."""
    engine = make_drafting_engine(kind=DraftingToy)
    engine._parts.speculation.force(WIDTH)
    with no_reads(monkeypatch), pytest.raises(AssertionError, match="reads a tensor"):
        run(engine, [ask()])


# --- planted bugs ---------------------------------------------------------------------------------------------


def rows_start_at_their_bound(lay_out: Any) -> Any:
    def planted(plan: Any, inputs: Any, lengths: Any, *rest: Any) -> Any:
        bounds = lengths.clone()
        bounds[torch.from_numpy(plan.slots.astype(np.int64))] = torch.from_numpy(plan.starts.astype(np.int64) + 1)
        return lay_out(plan, inputs, bounds, *rest)

    return planted


def everything_is_kept(keep: Any) -> Any:
    return lambda drawn, tokens, owner, column, drafted, *rest: keep(
        tokens.gather(rest[0]) * drafted + drawn * ~drafted, tokens, owner, column, drafted, *rest
    )


def numbers_of_the_lowest_position(choose: Any) -> Any:
    return lambda self, logits, rows, positions, *rest: choose(self, logits, rows, self._lowest[rows], *rest)


def slack_is_forgotten(launch: Any) -> Any:
    def planted(self: SlotState, plan: Any) -> None:
        launch(self, plan)
        self.slack[plan.slots] = 0

    return planted


@pytest.mark.parametrize(
    ("owner", "name", "bug"),
    [
        (ahead_step, "lay_out", rows_start_at_their_bound),
        (ahead_step, "keep_agreeing", everything_is_kept),
        (ahead_step.DeviceRows, "choose", numbers_of_the_lowest_position),
        (SlotState, "launch", slack_is_forgotten),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_planted_bugs_are_found(owner: Any, name: str, bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, bug(getattr(owner, name)))
    with pytest.raises((AssertionError, IndexError, RuntimeError, ValueError)):
        for job in range(12):
            rng = random.Random(job)
            engine = make_drafting_engine(**sizes(rng))
            engine._parts.speculation.force(WIDTH)
            check_all(engine, random_job(rng))
