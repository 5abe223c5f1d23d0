"""The loop: every answer of a job is what a lone sampler gives, whatever the batch does meanwhile."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
import torch
from deepinfer_offline.engine.base import Request, RequestError, RequestOutput
from deepinfer_offline.engine.native import engine as engine_module
from deepinfer_offline.sampling import SamplingParams
from toy_engine import VOCAB, ask, check, make_engine, prefix_hash, random_request, run, toy_logits


@pytest.mark.parametrize("seed", range(10))
def test_random_jobs_give_what_a_lone_sampler_gives(seed: int) -> None:
    """200 jobs: answers do not depend on the loop, batch, chunks, cache size, preemption or prefix cache."""
    for job in range(20):
        rng = random.Random(seed * 1000 + job)
        prefixes = [[rng.randrange(94) for _ in range(30)] for _ in range(3)]
        requests = [random_request(rng, f"r{place}", prefixes) for place in range(rng.randrange(1, 9))]
        shape: dict[str, Any] = {
            "pages": rng.choice([20, 33, 200]),
            "running": rng.choice([1, 2, 5, 8]),
            "budget": rng.choice([8, 13, 64]),
            "prefix": rng.random() < 0.7,
        }
        requests = [r for r in requests if len(r.prompt_token_ids) + (r.params.max_tokens or 0) < 78]
        ahead, lone = run(make_engine(ahead=2, **shape), requests), run(make_engine(ahead=1, **shape), requests)
        for output in (*ahead.values(), *lone.values()):
            output.num_cached_tokens = 0  # when a prefix becomes findable depends on the loop
        assert ahead == lone
        assert len(ahead) == len(requests)
        for request in requests:
            check(request, ahead[request.request_id])


def test_preemption_happens_and_changes_nothing() -> None:
    requests = [ask(f"r{i}", "abcdefgh"[i:], max_tokens=40) for i in range(5)]
    engine = make_engine(pages=21, running=5)
    for name, output in run(engine, requests).items():
        check(next(r for r in requests if r.request_id == name), output)
    assert engine.stats().preemptions > 0


def test_aborts_with_a_step_in_flight_leave_the_others_alone() -> None:
    requests = [ask(f"r{i}", "abcdefgh"[i:], max_tokens=30) for i in range(6)]
    engine = make_engine(pages=60)
    victims = {3: "r1", 6: "r4", 7: "r0"}
    outputs = run(engine, requests, lambda step: engine.abort(victims.get(step, "unknown")))
    assert set(outputs) == {"r2", "r3", "r5"}
    for name, output in outputs.items():
        check(next(r for r in requests if r.request_id == name), output)
    assert engine._parts.cache.stats().used_pages == 0


def test_all_blocks_come_back_after_late_ends() -> None:
    requests = [ask(f"r{i}", "xyz" * (i + 1), stop=["a", "b", "c"], max_tokens=50) for i in range(8)]
    engine = make_engine(pages=40, running=3)
    run(engine, requests)
    assert engine._parts.cache.stats().used_pages == 0
    assert not engine._answers
    assert not engine._groups


def test_the_next_step_is_launched_before_the_results_of_this_one_are_taken() -> None:
    engine = make_engine(delay=0.01)
    events: list[tuple[str, int]] = []
    runner = engine._parts.runner
    launch, collect = runner.launch, runner.collect
    runner.launch = lambda plan, masks=None: (events.append(("launch", plan.step)), launch(plan, masks))[1]
    runner.collect = lambda flight: (events.append(("collect", flight.plan.step)), collect(flight))[1]
    run(engine, [ask(max_tokens=10)])
    assert events.index(("launch", 6)) < events.index(("collect", 5))
    assert [event for event in events if event[0] == "collect"] == [("collect", step) for step in range(1, 11)]
    assert engine.stats().steps == 10  # an end by length is known ahead and costs no wasted step


def test_a_refused_request_queues_nothing() -> None:
    engine = make_engine()
    for bad in (
        ask(prompt="x" * 128),
        Request("b", [], SamplingParams()),
        Request("c", [VOCAB], SamplingParams()),
        Request("d", [-1], SamplingParams()),
        ask(logit_bias={VOCAB: 1}),
        ask(stop_token_ids=[VOCAB]),
        ask(logit_bias={3: 1, 1 << 70: 1}),
        ask(stop_token_ids=[1 << 70]),
        Request("e", [1 << 70], SamplingParams()),
        ask(logprobs=VOCAB + 1),
    ):
        with pytest.raises(RequestError):
            engine.add_request(bad)
    with pytest.raises(RequestError, match=r"130 tokens.*128 tokens"):
        engine.add_request(ask(prompt="x" * 130))
    assert not engine.has_unfinished()
    engine.add_request(ask("twice"))
    with pytest.raises(RequestError, match="twice"):
        engine.add_request(ask("twice"))
    engine.close()


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("broken", ["logits", "launch", "apply"])
def test_an_engine_that_was_broken_off_says_so_and_does_not_hang(
    ahead: int, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler waits for the result of a step that nobody will take."""

    def fail(*_: Any) -> None:
        raise ArithmeticError("no memory")

    engine = make_engine(ahead=ahead)
    parts = engine._parts
    owner, name = {
        "logits": (parts.runner.model, "forward"),
        "launch": (parts.runner, "add_sequences"),
        "apply": (parts.scheduler, "apply"),
    }[broken]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        if broken == "logits":
            with pytest.raises(ArithmeticError):
                engine.logits([1, 2, 3])
        else:
            engine.add_request(ask("a"))
            with pytest.raises(ArithmeticError):
                engine.step()
            engine.abort("a")
    said = r"the engine failed before \(no memory\); start another one"
    with pytest.raises(RuntimeError, match=said):
        engine.logits([1, 2, 3])
    engine.add_request(ask("b"))
    with pytest.raises(RuntimeError, match=said):
        engine.step()
    engine.close()


def test_an_answer_that_fails_fails_alone() -> None:
    engine = make_engine()
    requests = [ask("good"), ask("bad", n=2, stop=["~~~~"]), ask("fine", "other")]
    for request in requests:
        engine.add_request(request)
    engine.step()
    watch = engine._groups["bad"].answers[1].watch
    assert watch is not None
    watch.push = lambda token: 1 // 0  # type: ignore[method-assign]
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        outputs |= {output.request_id: output for output in engine.step()}
    engine.close()
    assert "division" in str(outputs["bad"].error)
    for request in (requests[0], requests[2]):
        check(request, outputs[request.request_id])
    assert engine._parts.cache.stats().used_pages == 0


def test_prompt_logprobs_are_those_of_every_prefix() -> None:
    for ahead, budget in ((1, 64), (2, 8)):
        engine = make_engine(ahead=ahead, budget=budget, running=4)
        requests = [ask("warm", "hello-world,-hello"), ask("p", "hello-world,-hello", prompt_logprobs=2, n=2)]
        outputs = run(engine, requests)
        found = outputs["p"].prompt_logprobs
        assert found is not None
        assert found[0] is None
        prompt = list(requests[1].prompt_token_ids)
        assert len(found) == len(prompt)
        for place, position in enumerate(found[1:], 1):
            row = torch.log_softmax(toy_logits(torch.tensor([prefix_hash(prompt[:place])])).double(), -1)[0]
            assert position.chosen.token_id == prompt[place]
            assert position.chosen.logprob == pytest.approx(float(row[prompt[place]]), abs=1e-4)
            assert [top.token_id for top in position.top] == row.topk(2).indices.tolist()
        check(requests[1], outputs["p"])


def test_logprobs_of_a_cut_answer_match_its_tokens() -> None:
    whole = run(make_engine(), [ask(max_tokens=20, logprobs=2)])["a"].outputs[0]
    assert len(whole.logprobs) == 20
    stop = whole.text[8:11]
    cut = run(make_engine(), [ask(max_tokens=20, logprobs=2, stop=stop)])["a"].outputs[0]
    assert (cut.text, cut.stop_reason) == (whole.text[:8], stop)
    assert cut.logprobs == whole.logprobs[:8]
    assert cut.cumulative_logprob == pytest.approx(sum(p.chosen.logprob for p in cut.logprobs))


def test_stats_add_up() -> None:
    engine = make_engine()
    requests = [ask("a", "hello,-this-is-shared"), ask("b", "hello,-this-is-shared", n=2)]
    outputs = run(engine, requests)
    stats = engine.stats()
    assert stats.prompt_tokens == 42
    assert stats.cached_tokens == sum(output.num_cached_tokens for output in outputs.values())
    assert stats.generated_tokens == 36
    assert stats.finished == 2
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.steps > 0
    assert stats.prefill_seconds > 0
    assert stats.peak_kv_blocks > 0


def test_unseeded_requests_repeat_by_request_id_and_children_differ() -> None:
    request = ask("id", temperature=1.0, n=3, max_tokens=30)
    first, second = (run(make_engine(), [request])["id"].outputs for _ in range(2))
    assert [a.token_ids for a in first] == [a.token_ids for a in second]
    assert len({tuple(a.token_ids) for a in first}) == 3
    other = run(make_engine(), [ask("other", temperature=1.0, n=3, max_tokens=30)])["other"].outputs
    assert [a.token_ids for a in other] != [a.token_ids for a in first]


def test_what_exists_is_looked_over_once_and_no_more_while_an_engine_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the collector itself, which the other tests' engines do not have (conftest.py): so this comes last."""
    monkeypatch.setattr(engine_module, "gc", gc)
    gc.unfreeze()
    cycle = type("Cycle", (), {})()
    cycle.itself = cycle
    left = weakref.ref(cycle)
    del cycle
    engine = make_engine()
    assert left() is None, "what is left of an engine before this one would be kept as long"
    assert gc.get_freeze_count() > 1000
    engine.close()
    assert gc.get_freeze_count() == 0
