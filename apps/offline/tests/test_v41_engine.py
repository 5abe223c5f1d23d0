"""V4.1 through `LLM` and the native loop: logits, prefix cache with replay, batches, counters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deepinfer_offline import LLM, SamplingParams
from deepinfer_offline.engine.native import build as build_module

ORACLE = Path(__file__).parent / "data" / "v41-oracle"
REPLAY = np.load(ORACLE / "dev-replay" / "cases.npz")
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
HITS = [g for g in range(int(REPLAY["num_groups"])) if int(REPLAY[f"g{g}_hit"])]


def model_of(llm: LLM) -> Any:
    return llm.engine._parts.runner.model  # pyrefly: ignore


def answers(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(out.outputs[0].token_ids) for out in llm.generate([list(map(int, p)) for p in prompts], params)]


@pytest.fixture(scope="module")
def cached() -> Iterator[LLM]:
    with LLM(ORACLE / "dev-replay", dtype="float32", engine="native", block_size=1, max_num_seqs=4) as llm:
        yield llm


@pytest.mark.parametrize("name", ["dev-backbone", "dev-engram", "dev-quant"])
def test_logits_of_every_position(name: str) -> None:
    expected = np.load(ORACLE / name / "cases.npz")
    with LLM(ORACLE / name, dtype="float32", engine="native") as llm:
        for i in range(2):
            got = np.asarray(llm.logits(expected[f"seq{i}_ids"].tolist()))
            assert got.dtype == np.float32
            assert np.abs(got - expected[f"seq{i}_logits"]).max() <= 1e-4


def test_text_prompt_without_a_tokenizer_is_refused_alone(cached: LLM) -> None:
    text, ids = cached.generate(["hello", [1, 2, 3]], ONE)
    assert text.error is not None
    assert "no tokenizer" in str(text.error)
    assert ids.error is None


@pytest.mark.parametrize("group", HITS)
def test_replay_after_a_hit_matches_the_oracle(cached: LLM, group: int) -> None:
    ids, hit = REPLAY[f"g{group}_ids"].tolist(), int(REPLAY[f"g{group}_hit"])
    cached.generate([ids[:hit]], ONE)
    out = cached.generate([ids], GREEDY)[0]
    assert out.num_cached_tokens == (hit if hit > 8 else 0)
    assert list(out.outputs[0].token_ids) == REPLAY[f"g{group}_both_paper_greedy"].tolist()


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("block_size", [1, 16])
def test_cold_decoder_replay_matches_the_oracle(asynchronous: bool, block_size: int) -> None:
    groups = [g for g in range(int(REPLAY["num_groups"])) if f"g{g}_dec_paper_greedy" in REPLAY.files]
    with LLM(
        ORACLE / "dev-replay",
        dtype="float32",
        engine="native",
        block_size=block_size,
        async_scheduling=asynchronous,
        enable_prefix_caching=False,
    ) as llm:
        got = answers(llm, [REPLAY[f"g{g}_ids"] for g in groups])
    assert got == [REPLAY[f"g{g}_dec_paper_greedy"].tolist() for g in groups]


def prompts(count: int) -> list[list[int]]:
    """Prompts that share long prefixes, 40 to 70 tokens."""
    rng = np.random.default_rng(0)
    stems = [rng.integers(0, 78, 58).tolist() for _ in range(4)]
    return [stems[i % 4][: 36 + i % 23] + rng.integers(0, 78, 4 + i % 9).tolist() for i in range(count)]


def exact_engine(monkeypatch: pytest.MonkeyPatch, **options: Any) -> LLM:
    """An engine whose hits replay L (W - 1) tokens and whose prompts pass every layer in full."""
    original = build_module._limits

    def limits(*args: Any) -> Any:
        return replace(original(*args), strategy="exact", num_layers=7)

    monkeypatch.setattr(build_module, "_limits", limits)
    llm = LLM(ORACLE / "dev-replay", dtype="float32", engine="native", **options)
    model_of(llm).follow_strategy("exact")
    return llm


def test_greedy_answers_are_equal_with_and_without_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefix cache on and off, asynchronous and synchronous, batch 1 and 64: one set of answers."""
    asked = prompts(64)
    found: dict[str, list[list[int]]] = {}
    for name, options in {
        "plain": {"enable_prefix_caching": False, "max_num_seqs": 64},
        "cached": {"block_size": 1, "max_num_seqs": 64},
        "one by one": {"block_size": 1, "max_num_seqs": 1},
        "synchronous": {"block_size": 4, "max_num_seqs": 16, "async_scheduling": False},
        "small steps": {"block_size": 2, "max_num_seqs": 8, "max_num_batched_tokens": 24},
    }.items():
        with exact_engine(monkeypatch, **options) as llm:
            found[name] = answers(llm, asked)
            if name == "one by one":
                assert llm.stats().cached_tokens > 0
    for name, got in found.items():
        assert got == found["plain"], name


def test_counted_work_of_a_job() -> None:
    """Layer-tokens of prefill: N * cut + min(N, W) * (L - cut); a hit adds at most W rows."""
    ids = prompts(1)[0]
    with LLM(ORACLE / "dev-replay", dtype="float32", engine="native", block_size=1, max_num_seqs=2) as llm:
        counters = model_of(llm).counters
        llm.generate([ids], ONE)
        assert counters.layer_tokens == len(ids) * 4 + 8 * 3
        before = counters.tokens
        more = [*ids, 5, 6, 7]
        out = llm.generate([more], ONE)[0]
        assert out.num_cached_tokens == len(ids)
        assert counters.tokens - before == 3 + 8


def test_prompt_logprobs_keep_every_row() -> None:
    ids = prompts(1)[0]
    with LLM(ORACLE / "dev-replay", dtype="float32", engine="native") as llm:
        logits = np.asarray(llm.logits(ids), dtype=np.float64)
        out = llm.generate([ids], replace_params(ONE, prompt_logprobs=0))[0]
    assert out.prompt_logprobs is not None
    top = logits.max(-1, keepdims=True)
    logprobs = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    for position in range(1, len(ids)):
        entry = out.prompt_logprobs[position]
        assert entry is not None
        assert entry.chosen.logprob == pytest.approx(logprobs[position - 1, ids[position]], abs=1e-4)


def replace_params(params: SamplingParams, **fields: Any) -> SamplingParams:
    return replace(params, **fields)
