"""The loop on a toy model that reads every earlier token back through the block tables.

The toy's next-token distribution is a hash of the whole prefix as it lies in the paged cache, so a block freed too
early, written twice, or read from the wrong place changes the answer. What an answer must be is computed here without
an engine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from deepinfer_cache import CacheConfig, CacheManager
from deepinfer_cache import CacheGroup as PagedGroup
from deepinfer_offline.engine.base import EngineInfo, Request, RequestError, RequestOutput
from deepinfer_offline.engine.native.engine import NativeEngine
from deepinfer_offline.engine.native.parts import Parts
from deepinfer_offline.engine.native.runner import ModelRunner
from deepinfer_offline.engine.structured import GrammarCompiler
from deepinfer_offline.models.base import CacheGroup, ForwardBatch, ModelFacts, ModelOptions
from deepinfer_offline.sampling import Sampler, SamplingBatch, SamplingParams, SamplingTable
from deepinfer_offline.sampling.random import child_seed, request_seed
from deepinfer_offline.text.tokenizer import Tokenizer
from deepinfer_sched import SchedConfig, Scheduler
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

VOCAB, EOS, BLOCK = 96, 95, 4
LETTERS = [chr(ord("!") + place) for place in range(94)]
PRIME = 2_147_483_629


def toy_logits(hashes: torch.Tensor) -> torch.Tensor:
    """Pseudo-random logits in 0..8 from int64 hashes [n]: float32 [n, VOCAB]."""
    mixed = (hashes[:, None] * (torch.arange(VOCAB) * 7919 + 104_729)) % PRIME
    return ((mixed * 48_271) % PRIME).float() / PRIME * 8


def prefix_hash(tokens: list[int]) -> int:
    value = 17
    for token in tokens:
        value = (value * 31_337 + token + 1) % PRIME
    return value


class ToyModel:
    """Keeps token ids as its cached state; see the module's docstring."""

    def __init__(self, max_running: int, max_model_len: int, max_step_tokens: int, delay: float = 0.0) -> None:
        self.options = ModelOptions("cpu", torch.float32, max_model_len, max_running, max_step_tokens, BLOCK)
        self.facts = ModelFacts("toy", VOCAB, 4096, 0, 0, (CacheGroup("kv", "prefix", BLOCK, 8 * BLOCK),))
        self.delay = delay
        self.fail: Callable[[ForwardBatch], None] | None = None

    def allocate_cache(self, num_blocks: Mapping[str, int]) -> torch.Tensor:
        return torch.full((num_blocks["kv"] * BLOCK,), -1, dtype=torch.int64)

    def forward(self, batch: ForwardBatch, cache: torch.Tensor) -> torch.Tensor:
        host, table = batch.host, batch.host.block_tables["kv"]
        time.sleep(self.delay)
        for row in range(host.num_rows):
            first, last = host.query_starts[row], host.query_starts[row + 1]
            for flat in range(first, last):
                position = int(batch.positions[flat])
                token = int(batch.token_ids[flat])
                assert 0 <= token < VOCAB, f"token id {token} reached the model"
                if position >= host.write_floors[row]:
                    cache[table[row, position // BLOCK] * BLOCK + position % BLOCK] = token
        found = []
        for flat in host.logit_rows.tolist():
            row = int(np.searchsorted(host.query_starts, flat, side="right")) - 1
            places = np.arange(int(batch.positions[flat]) + 1)
            index = torch.from_numpy(table[row, places // BLOCK].astype(np.int64) * BLOCK + places % BLOCK)
            found.append(prefix_hash(cache[index].tolist()))
        return torch.tensor(found, dtype=torch.int64)[:, None]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return toy_logits(hidden[:, 0])


def toy_tokenizer() -> Tokenizer:
    vocab = {letter: place for place, letter in enumerate(LETTERS)}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<pad>", "<eos>"])
    assert backend.token_to_id("<eos>") == EOS
    return Tokenizer(backend, eos_ids=[EOS], eos_token="<eos>", name="toy")


TOKENIZER = toy_tokenizer()


def make_engine(
    *, ahead: int = 2, pages: int = 200, running: int = 8, budget: int = 32, prefix: bool = True, delay: float = 0.0
) -> NativeEngine:
    max_len = 128
    model = ToyModel(running, max_len, budget, delay)
    config = CacheConfig(
        (PagedGroup("kv", "prefix", BLOCK, 1, 8),),
        pages,
        running,
        max_len,
        budget,
        ahead,
        enable_prefix_cache=prefix,
    )
    cache = CacheManager(config)
    scheduler = Scheduler(SchedConfig(running, budget, max_len, max_in_flight=ahead), cache)
    table = SamplingTable(running)
    runner = ModelRunner(
        model, {"kv": cache.num_blocks("kv")}, cache.block_table, Sampler(table), threads=1 if ahead > 1 else 0
    )
    info = EngineInfo("native", "toy", "cpu", "float32", max_len, VOCAB, pages * BLOCK, 0, 0, BLOCK)
    grammars = GrammarCompiler(TOKENIZER, VOCAB)
    return NativeEngine(Parts(runner, scheduler, cache, table, TOKENIZER, grammars, info, seed=3, ahead=ahead))


def run(engine: NativeEngine, requests: list[Request], on_step: Callable[[int], Any] | None = None):
    outputs: dict[str, RequestOutput] = {}
    for request in requests:
        engine.add_request(request)
    steps = 0
    while engine.has_unfinished():
        for output in engine.step():
            assert output.request_id not in outputs
            outputs[output.request_id] = output
        steps += 1
        assert steps < 20_000
        if on_step is not None:
            on_step(steps)
    engine.close()
    return outputs


def letters(tokens: list[int]) -> str:
    return "".join(LETTERS[token] for token in tokens if token < 94)


def expected(prompt: list[int], params: SamplingParams, seed: int) -> tuple[list[int], str, str]:
    """One answer without an engine: one row, one token at a time, the sampler on its own."""
    table = SamplingTable(1)
    stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    table.write(0, params, seed=seed, prompt_len=len(prompt), stop_ids=sorted(stop_ids), vocab_size=VOCAB)
    tokens, text, limit = list(prompt), "", 128 if params.max_tokens is None else len(prompt) + params.max_tokens
    while True:
        logits = toy_logits(torch.tensor([prefix_hash(tokens)]))
        buffer = torch.tensor([tokens])
        batch = SamplingBatch(np.zeros(1, np.int64), np.array([len(tokens)]), buffer)
        token = int(Sampler(table)(logits, batch).ids[0])
        tokens.append(token)
        answer = tokens[len(prompt) :]
        if token in stop_ids and len(answer) > params.min_tokens:
            return answer, letters(answer if params.include_stop_str_in_output else answer[:-1]), "stop"
        text = letters(answer)
        for stop in params.stop:
            if len(answer) > params.min_tokens and text.endswith(stop) and token < 94:
                kept = len(text) if params.include_stop_str_in_output else len(text) - len(stop)
                ends = np.cumsum([t < 94 for t in answer])
                return answer[: int(np.searchsorted(ends, kept)) + 1 if kept else 0], text[:kept], "stop"
        if len(tokens) >= min(limit, 128):
            return answer, text, "length"


def check(request: Request, output: RequestOutput, engine_seed: int = 3) -> None:
    params = request.params
    base = params.seed if params.seed is not None else request_seed(engine_seed, request.request_id)
    assert output.error is None
    assert [answer.index for answer in output.outputs] == list(range(params.n))
    for answer in output.outputs:
        ids, text, reason = expected(list(request.prompt_token_ids), params, child_seed(base, answer.index))
        assert answer.token_ids == ids
        assert answer.finish_reason == reason
        assert answer.text == text
        if params.logprobs is not None:
            assert answer.logprobs is not None
            assert [position.chosen.token_id for position in answer.logprobs] == answer.token_ids
            tokens = list(request.prompt_token_ids)
            for position in answer.logprobs:
                row = torch.log_softmax(toy_logits(torch.tensor([prefix_hash(tokens)])).double(), -1)[0]
                assert position.chosen.logprob == pytest.approx(float(row[position.chosen.token_id]), abs=1e-4)
                tokens.append(position.chosen.token_id)


def random_request(rng: random.Random, name: str, prefixes: list[list[int]]) -> Request:
    prompt = rng.choice(prefixes)[: rng.randrange(0, 30)] + [rng.randrange(94) for _ in range(rng.randrange(1, 12))]
    stops = [rng.choice(LETTERS) for _ in range(2)] if rng.random() < 0.3 else []
    if rng.random() < 0.3:
        stops.append(rng.choice(LETTERS) + rng.choice(LETTERS))
    params = SamplingParams(
        n=rng.choice([1, 1, 1, 2, 3]),
        temperature=rng.choice([0.0, 0.0, 0.7, 1.3]),
        top_p=rng.choice([1.0, 0.8]),
        top_k=rng.choice([0, 5]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.5]),
        seed=rng.choice([None, rng.randrange(1000)]),
        stop=stops,
        stop_token_ids=[rng.randrange(94)] if rng.random() < 0.3 else [],
        ignore_eos=rng.random() < 0.2,
        max_tokens=rng.choice([1, 2, 5, 20, 40]),
        min_tokens=rng.choice([0, 0, 1]),
        logprobs=rng.choice([None, None, 0, 3]),
        logit_bias={EOS: 2.0} if rng.random() < 0.3 else None,
        include_stop_str_in_output=rng.random() < 0.3,
    )
    return Request(name, prompt, params, priority=rng.choice([0, 0, 1]))


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


def ask(name: str = "a", prompt: str = "hello", **params: Any) -> Request:
    params = {"temperature": 0, "max_tokens": 12, "ignore_eos": True} | params
    return Request(name, TOKENIZER.encode(prompt), SamplingParams(**params))


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


class Guesses:
    """Drafts for the loop: the true next tokens, with some of them spoiled."""

    synchronous = True

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, truth: dict[tuple[str, int], list[int]]) -> None:
        self.scheduler, self.runner, self.truth = scheduler, runner, truth
        self.rng = random.Random(0)

    def propose(self, answers: Any) -> None:
        state = self.scheduler.state
        for answer in answers:
            seq, slot = answer.seq, answer.seq.slot
            if slot < 0 or state.pending[slot] or state.computed[slot] < state.target[slot]:
                continue
            known = self.truth[answer.group.request.request_id, answer.index]
            guess = known[seq.num_generated : seq.num_generated + self.rng.randrange(5)]
            guess = [self.rng.randrange(VOCAB) if self.rng.random() < 0.2 else token for token in guess]
            self.scheduler.propose(seq.seq_id, len(guess))
            if guess:
                self.runner.write_drafts(slot, len(seq.tokens), guess)

    def begin(self, answer: Any) -> None: ...

    def extend(self, seq_id: int, tokens: list[int]) -> None: ...

    def end(self, seq_id: int) -> None: ...

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
    def __init__(self, fails_at: int = -1) -> None:
        self.fails_at = fails_at

    def matcher(self) -> CycleMatcher:
        return CycleMatcher(self.fails_at)


@pytest.mark.parametrize("ahead", [1, 2])
def test_masks_wait_for_the_tokens_before(ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step in flight reaches its draws long before the loop has told the grammar the last token."""
    engine = make_engine(ahead=ahead, running=6)
    apply = engine._apply
    monkeypatch.setattr(engine, "_apply", lambda result: (time.sleep(0.01), apply(result)))
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
