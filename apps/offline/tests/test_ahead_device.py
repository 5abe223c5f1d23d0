"""What steps ahead of the host may look at: budgets at old blocks only, and the host at nothing while a step is launched."""

from __future__ import annotations

import copy
import random
import threading
from collections import Counter
from collections.abc import Iterator
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
from torch.utils._python_dispatch import TorchDispatchMode
from toy_drafts import WIDTH, BoundsToy, DraftingToy, check_all, count_steps, make_drafting_engine, random_job, sizes
from toy_engine import ask, run


class Watch:
    """Computes every budget twice: as it is, and with garbage for what the step before drafted, where that is known.

    Args:
        drafts: what plans the steps.
    """

    def __init__(self, drafts: AheadDrafts) -> None:
        self.budgets = self.fresh = 0
        self.drafts = drafts
        self._landed, self._planner = drafts.landed, drafts._planner
        self._step, self._twin = 0, copy.deepcopy(drafts._planner)
        self._rng = np.random.default_rng(0)
        drafts.landed, drafts._planner = self.landed, self  # type: ignore[method-assign,assignment]

    def landed(self, result: Any, *rest: Any) -> None:
        self._step = result.plan.step
        self._landed(result, *rest)

    def record(self, step: int, slots: np.ndarray, survivals: np.ndarray) -> None:
        self._twin = copy.deepcopy(self._planner)
        self._twin.record(step, slots, self._rng.random(survivals.shape).astype(np.float32))
        self._planner.record(step, slots, survivals)

    def begin(self, slot: int) -> None:
        self._twin.begin(slot)
        self._planner.begin(slot)

    def budget(self, step: int, slots: np.ndarray, *rest: Any, **named: Any) -> int:
        found = self._planner.budget(step, slots, *rest, **named)
        self.budgets += 1
        if self._step > step - 2:
            self.fresh += 1
            assert found == self._twin.budget(step, slots, *rest, **named), "a budget saw a fresh block"
            expected = self._planner.expected(step, slots), self._twin.expected(step, slots)
            assert np.array_equal(*expected), "a budget saw a fresh block"
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
    assert watch.budgets > 30
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
    engine.close()


def test_a_step_that_verifies_nothing_is_priced_as_one_that_drafts() -> None:
    """Plain steps take 10 ms; drafting takes 2 more whatever is verified, so it says nothing against verifying."""
    engine, watch = budgeted_engine()
    drafts: Any = watch.drafts
    for rows in (1, 2):
        for _ in range(3):
            drafts.plain.observe_ahead(rows, 0.010)
            drafts.costs.observe(rows, 0, 0.012)
    assert drafts.seconds(2)[0] == pytest.approx(0.012)
    assert drafts.plain.ahead(2) == pytest.approx(0.010)
    engine.close()


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
    engine.close()
