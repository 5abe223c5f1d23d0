"""Steps that verify drafts ahead of the host: the answers are those of the model alone, whatever runs when.

`toy_engine.check` computes what an answer must be without an engine: one token at a time, from the model's own distribution.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from deepinfer_offline.engine.native import ahead_step
from deepinfer_offline.engine.native.engine import NativeEngine
from deepinfer_offline.sampling.device_draws import RowDraws
from deepinfer_sched.slots import SlotState
from deepinfer_specdec import create_drafter
from deepinfer_specdec.scheduling.switch import SpeculationSwitch
from toy_drafts import WIDTH, BoundsToy, DraftingToy, check_all, count_steps, make_drafting_engine, random_job, sizes
from toy_engine import ask, check, run


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
    assert seen["ahead"]
    assert not seen["host"]
    assert not seen["plain"]
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


@pytest.mark.parametrize("measured", ["nothing", "much", "what the clock says"])
def test_left_to_itself_it_tries_and_then_decides(measured: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the clock says of drafts: plain steps, then a try, and answers do not depend on what follows."""
    measure = SpeculationSwitch.measure
    worth = {"nothing": 0.01, "much": 100.0}.get(measured)
    if worth is not None:
        monkeypatch.setattr(SpeculationSwitch, "measure", lambda self, _without, _along: measure(self, worth, 1.0))
    seen: Counter[str] = Counter()
    for job in range(8):
        rng = random.Random(job)
        engine = make_drafting_engine(pages=200, running=8, budget=64)
        steps = count_steps(engine)
        check_all(
            engine, [ask(f"r{place}", "word"[place % 4 :], max_tokens=60) for place in range(rng.randrange(1, 9))]
        )
        assert steps["plain"]
        assert steps["ahead"]
        seen += steps
    assert seen["follows"] >= 8


def test_another_drafter_can_be_forced_while_steps_are_in_flight() -> None:
    """In the middle of answers, with steps in flight that draft themselves; and when all answers have ended."""
    seen: Counter[str] = Counter()
    for job in range(12):
        rng = random.Random(job)
        engine = make_drafting_engine(**sizes(rng))
        speculation: Any = engine._parts.speculation
        speculation.force(WIDTH)
        steps, when = count_steps(engine), rng.randrange(3, 8)

        def change(
            step: int, when: int = when, engine: Any = engine, speculation: Any = speculation, steps: Any = steps
        ) -> None:
            if step == when:
                steps["flying"] += any(one.flight.plan.ahead is not None for one in engine._airborne)
                speculation.force(3, create_drafter("suffix"))

        check_all(engine, random_job(rng), change)
        seen += steps
    assert min(seen["flying"], seen["ahead"], seen["host"]) > 5


def test_another_drafter_can_be_forced_while_a_step_of_ended_answers_is_in_flight() -> None:
    engine = make_drafting_engine(pages=200, running=8)
    speculation: Any = engine._parts.speculation
    speculation.force(WIDTH)
    request = ask("first", "word", max_tokens=60, temperature=1.0, seed=3, stop=list("abcdxy"))
    engine.add_request(request)
    while engine.has_unfinished():
        found = engine.step()
    check(request, found[0])
    assert engine._airborne, "no step was left: the test shows nothing"
    speculation.force(3, create_drafter("suffix"))
    check_all(engine, [ask("second", "word", max_tokens=60)])


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
    assert steps["host"]
    assert not steps["ahead"]


# --- planted bugs ---------------------------------------------------------------------------------------------


def rows_start_at_their_bound(lay_out: Any) -> Any:
    def planted(plan: Any, state: Any, *rest: Any) -> Any:
        bounds = state.lengths.clone()
        bounds[torch.from_numpy(plan.slots.astype(np.int64))] = torch.from_numpy(plan.starts.astype(np.int64) + 1)
        return lay_out(plan, replace(state, lengths=bounds), *rest)

    return planted


def everything_is_kept(keep: Any) -> Any:
    return lambda drawn, tokens, owner, column, drafted, *rest: keep(
        tokens.gather(rest[0]) * drafted + drawn * ~drafted, tokens, owner, column, drafted, *rest
    )


def numbers_of_the_lowest_position(choose: Any) -> Any:
    return lambda self, logits, positions, *rest: choose(self, logits, self._params.lowest[self._rows], *rest)


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
        (RowDraws, "choose", numbers_of_the_lowest_position),
        (SlotState, "launch", slack_is_forgotten),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_planted_bugs_are_found(owner: Any, name: str, bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, bug(getattr(owner, name)))

    def jobs() -> None:
        for job in range(12):
            rng = random.Random(job)
            engine = make_drafting_engine(**sizes(rng))
            engine._parts.speculation.force(WIDTH)
            check_all(engine, random_job(rng))

    with pytest.raises((AssertionError, IndexError, RuntimeError, ValueError)):
        jobs()


def test_what_is_drawn_for_answers_that_have_ended_is_no_gain() -> None:
    """A step that was launched before an answer's stop was known draws for it once more."""
    engine = make_drafting_engine(pages=400, budget=64, running=8)
    speculation: Any = engine._parts.speculation
    speculation.force(WIDTH)
    landed, counted, drawn = speculation.landed, [], []
    collect = engine._parts.runner.collect

    def count(result: Any, answers: Any) -> None:
        counted.append(int(result.num_tokens.sum()))
        landed(result, answers)

    def watch(flight: Any) -> Any:
        result = collect(flight)
        drawn.append(int(result.num_tokens.sum()))
        return result

    speculation.landed, engine._parts.runner.collect = count, watch
    run(
        engine,
        [
            ask(f"r{i}", "abcdefgh"[i % 8 :], max_tokens=40, temperature=1.0, seed=i, stop=list("abcdxy"))
            for i in range(32)
        ],
    )
    stats = engine.stats()
    assert sum(counted) == stats.generated_tokens
    assert sum(drawn) > 1.1 * stats.generated_tokens
    assert stats.accepted_tokens < stats.generated_tokens
