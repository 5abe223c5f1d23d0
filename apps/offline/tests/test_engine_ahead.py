"""What runs ahead of results: drafts and masks change the number of steps, not the answers."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from deepinfer_offline.engine.native.runner import ModelRunner
from deepinfer_sched import Scheduler
from toy_engine import VOCAB, ask, check, make_engine, random_request, run


class Guesses:
    """Drafts for the loop: the true next tokens, with some of them spoiled."""

    synchronous = True

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, truth: dict[tuple[str, int], list[int]]) -> None:
        self.scheduler, self.runner, self.truth = scheduler, runner, truth
        self.rng = random.Random(0)

    def propose(self, answers: Any) -> None:
        state = self.scheduler.state
        for answer in answers.values():
            seq, slot = answer.seq, answer.seq.slot
            if slot < 0 or state.pending[slot] or state.computed[slot] < state.target[slot]:
                continue
            known = self.truth[answer.group.request.request_id, answer.index]
            guess = known[seq.num_generated : seq.num_generated + self.rng.randrange(5)]
            guess = [self.rng.randrange(VOCAB) if self.rng.random() < 0.2 else token for token in guess]
            self.scheduler.propose(seq.seq_id, len(guess))
            if guess:
                place, length = np.array([len(seq.tokens)]), np.array([len(guess)])
                self.runner.write_drafts(np.array([slot]), place, np.array([guess]), length)

    def ahead(self) -> None:
        """These drafts pass through the host."""

    def end(self, answer: Any) -> None: ...

    def landed(self, result: Any, answers: Any) -> None: ...

    def report(self) -> dict[str, Any]:
        return {}


def test_drafts_change_the_number_of_steps_and_nothing_else() -> None:
    """Greedy, sampled, penalised and stopped answers; stops inside accepted drafts; blocks that come short."""
    for job in range(25):
        rng = random.Random(job)
        prefixes = [[rng.randrange(94) for _ in range(30)] for _ in range(2)]
        requests = [random_request(rng, f"r{place}", prefixes) for place in range(rng.randrange(2, 7))]
        requests = [r for r in requests if len(r.prompt_token_ids) + (r.params.max_tokens or 0) < 78]
        plain = make_engine(pages=rng.choice([24, 200]), budget=rng.choice([12, 64]))
        outputs = run(plain, requests)
        truth = {(name, a.index): [*a.token_ids, 0, 0, 0] for name, o in outputs.items() for a in o.outputs}
        engine = make_engine(pages=rng.choice([24, 200]), budget=rng.choice([12, 64]))
        parts = engine._parts
        engine._parts = replace(parts, speculation=Guesses(parts.scheduler, parts.runner, truth))  # type: ignore[arg-type]
        drafted = run(engine, requests)
        for request in requests:
            check(request, drafted[request.request_id])
        stats = engine.stats()
        if any(len(answer.token_ids) > 8 for output in outputs.values() for answer in output.outputs):
            assert stats.accepted_tokens > 0
        assert engine._parts.cache.stats().used_pages == 0


class CycleMatcher:
    """Allows exactly one token at a time, a different one after each; breaks when asked to."""

    def __init__(self, fails_at: int = -1) -> None:
        self.count, self.fails_at = 0, fails_at
        self.is_terminated = False

    def _next(self) -> int:
        return self.count * 7 % 94

    def accept(self, tokens: list[int]) -> int:
        good = tokens == [self._next()]
        self.count += good
        return int(good)

    def fill_mask(self, row: np.ndarray) -> None:
        if self.count == self.fails_at:
            raise RuntimeError("the grammar gave up")
        row[:] = 0
        row.view(np.uint32)[self._next() // 32] = np.uint32(1 << (self._next() % 32))


class CycleGrammar:
    notes = ()

    def __init__(self, fails_at: int = -1) -> None:
        self.fails_at = fails_at

    def matcher(self) -> CycleMatcher:
        return CycleMatcher(self.fails_at)


@pytest.mark.parametrize("ahead", [1, 2])
def test_masks_wait_for_the_tokens_before(ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step in flight reaches its draws long before the loop has told the grammar the last token."""
    engine = make_engine(ahead=ahead, running=6)
    apply = engine._apply
    monkeypatch.setattr(engine, "_apply", lambda result: (time.sleep(0.01), apply(result))[1])
    free = [ask("free", "plain"), ask("other", "words", temperature=0.9)]
    bound = [replace(ask(f"g{i}", "abc"[i:], max_tokens=15), grammar=CycleGrammar()) for i in range(3)]
    broken = replace(ask("broken", "zz", max_tokens=15), grammar=CycleGrammar(fails_at=6))
    outputs = run(engine, [free[0], *bound, broken, free[1]])
    for request in bound:
        assert outputs[request.request_id].error is None
        assert outputs[request.request_id].outputs[0].token_ids == [place * 7 % 94 for place in range(15)]
    assert "gave up" in str(outputs["broken"].error)
    for request in free:
        check(request, outputs[request.request_id])
