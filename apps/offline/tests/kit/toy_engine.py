"""The loop on a toy model that reads every earlier token back through the block tables.

The toy's next-token distribution is a hash of the whole prefix as it lies in the paged cache, so a block freed too
early, written twice, or read from the wrong place changes the answer. What an answer must be is computed here without
an engine.
"""

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from deepinfer_cache import CacheConfig, CacheManager
from deepinfer_cache import CacheGroup as PagedGroup
from deepinfer_offline.engine.base import EngineInfo, Request, RequestOutput
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
    *,
    ahead: int = 2,
    pages: int = 200,
    running: int = 8,
    budget: int = 32,
    prefix: bool = True,
    delay: float = 0.0,
    kind: type[ToyModel] = ToyModel,
) -> NativeEngine:
    max_len = 128
    model = kind(running, max_len, budget, delay)
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


def ask(name: str = "a", prompt: str = "hello", **params: Any) -> Request:
    params = {"temperature": 0, "max_tokens": 12, "ignore_eos": True} | params
    return Request(name, TOKENIZER.encode(prompt), SamplingParams(**params))
