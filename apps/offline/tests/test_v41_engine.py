"""V4.1 through `LLM` and the native loop: logits, prefix cache with replay, batches, counters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deepinfer_offline import LLM, SamplingParams
from deepinfer_offline.cli import run as run_module
from deepinfer_offline.cli.main import call
from deepinfer_offline.engine.base import EngineStartError, RequestError
from deepinfer_offline.engine.options import OptionsError

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


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    """Answers to `prompts(64)` with every row computed in every layer, and no prefix cache."""
    with tiny(enable_prefix_caching=False, window_strategy="exact", max_num_seqs=64) as llm:
        assert model_of(llm).decoder_replay == "off"
        return answers(llm, prompts(64))


def tiny(**options: Any) -> LLM:
    return LLM(ORACLE / "dev-replay", dtype="float32", engine="native", **options)


@pytest.mark.parametrize("strategy", ["exact", "full", "periodic", "periodic(8)"])
@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 1, "max_num_seqs": 64},
        {"block_size": 1, "max_num_seqs": 1},
        {"block_size": 4, "max_num_seqs": 64, "async_scheduling": False},
        {"block_size": 2, "max_num_seqs": 8, "max_num_batched_tokens": 24},
    ],
    ids=["batch 64", "batch 1", "synchronous", "small steps"],
)
def test_greedy_answers_are_equal_with_and_without_everything(
    plain: list[list[int]], strategy: str, options: dict[str, Any]
) -> None:
    """Prefix cache on and off, asynchronous and synchronous, batch 1 and 64, strategies that promise a full prefill's numbers."""
    some = slice(40 if options["max_num_seqs"] == 1 else 0, 64)
    with tiny(window_strategy=strategy, **options) as llm:
        assert answers(llm, prompts(64)[some]) == plain[some]
        hits = llm.stats().cached_tokens
    # `periodic` alone keeps a window every 2,048 tokens, which these prompts do not reach.
    assert (hits > 0) == (strategy != "periodic")


@pytest.mark.parametrize(("replay", "expected"), [(True, "paper"), (False, "off")])
def test_bounded_is_the_default_and_decoder_replay_a_switch(
    plain: list[list[int]], replay: bool, expected: str
) -> None:
    with tiny(block_size=1, decoder_replay=replay, enable_prefix_caching=False) as llm:
        model, strategy = model_of(llm), llm.engine._parts.cache.config.strategy  # pyrefly: ignore
        got = answers(llm, prompts(8))
    assert (model.decoder_replay, strategy) == (expected, "bounded")
    assert (got == plain[:8]) == (not replay)


@pytest.mark.parametrize("strategy", ["full", "periodic(8)"])
def test_odd_hit_is_cut_to_whole_pairs_where_nothing_is_replayed(strategy: str) -> None:
    """A hit of an odd number of tokens finds no open pair: all 37 tokens are cached, and 36 count."""
    ids = prompts(1)[0][:37]
    with tiny(block_size=1, window_strategy=strategy, max_num_seqs=2) as llm:
        llm.generate([ids], ONE)
        out = llm.generate([[*ids, 5, 6, 7]], GREEDY)[0]
        hit = out.num_cached_tokens
    with tiny(window_strategy="exact", enable_prefix_caching=False) as llm:
        assert answers(llm, [[*ids, 5, 6, 7]]) == [list(out.outputs[0].token_ids)]
    assert hit == (
        36 if strategy == "full" else 37
    )  # `periodic` computes the odd token again, from its window at 32 on


def test_window_strategy_needs_windows_and_whole_blocks() -> None:
    with pytest.raises(EngineStartError, match="period must be a multiple of 4 tokens"):
        tiny(block_size=4, window_strategy="periodic(6)")
    with pytest.raises(OptionsError, match="periodic\\(N\\)"):
        tiny(window_strategy="periodic(0)")


@pytest.mark.parametrize("strategy", ["exact", "full"])
def test_pages_of_a_store_serve_each_strategy(plain: list[list[int]], strategy: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"block_size": 1, "window_strategy": strategy, "kv_store": tmp_path}
    for _ in range(2):
        with tiny(**options) as llm:
            assert answers(llm, prompts(64)[40:48]) == plain[40:48]
            loaded = llm.stats().extra["kv_store"]["loaded_pages"]
    assert loaded > 50


def test_switches_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(run_module, "_run", lambda options, traceback: asked.append(options) or 0)
    assert call(["run", "in.jsonl", "-o", "out.jsonl"]) == 0
    assert call(["run", "in.jsonl", "-o", "o", "--window-strategy", "periodic(64)", "--no-decoder-replay"]) == 0
    found = [(job.engine.window_strategy, job.engine.decoder_replay) for job in asked]
    assert found == [("auto", True), ("periodic(64)", False)]
    assert (
        asked[0].fingerprint() != replace(asked[0], engine=replace(asked[0].engine, decoder_replay=False)).fingerprint()
    )
    assert call(["run", "in.jsonl", "-o", "out.jsonl", "--window-strategy", "half"]) == 2


def test_image_ids_are_refused_in_a_sentence() -> None:
    with tiny() as llm:
        image, text = llm.generate([[1, 2, 78, 3], [1, 2, 3]], ONE)
        assert "id 78 at position 2, which stands for an image" in str(image.error)
        assert text.error is None
        with pytest.raises(RequestError, match="no images"):
            llm.logits([78])


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
