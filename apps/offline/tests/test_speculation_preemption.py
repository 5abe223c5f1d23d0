"""Sequences that lose their room while their drafts are verified: answers are those of plain decoding with room for all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from deepinfer_offline import LLM, SamplingParams  # noqa: E402
from tiny_dspark import VOCAB, WIDTH  # noqa: E402

# 31 blocks of four tokens for six sequences of up to 64; the draft keeps a layer's keys and values beside the model's three.
KV_MEMORY = {"suffix": 48 << 10, "dspark": 64 << 10}
BLOCKS = 31
SMALL = {"max_num_seqs": 6, "max_model_len": 64, "block_size": 4, "max_num_batched_tokens": 40}
JOBS = 8


def open_llm(made: tuple[Path, Path], speculative: str, **options: Any) -> LLM:
    """float32: in bfloat16 a near-tie may fall differently in another batch shape."""
    draft = {"draft_model": made[1]} if speculative == "dspark" else {}
    return LLM(made[0], dtype="float32", engine="native", speculative=speculative, **draft, **options)


@pytest.fixture(scope="module")
def plain(made: tuple[Path, Path]) -> Iterator[LLM]:
    with open_llm(made, "off", max_model_len=64) as llm:
        yield llm


def random_job(seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Ten prompts with stems in common, and repeats that a suffix drafter finds; greedy and sampled, with every kind of end."""
    rng = np.random.default_rng(seed)
    stem = rng.integers(1, VOCAB, 12).tolist()
    asked, params = [], []
    for _ in range(10):
        asked.append(stem[: rng.integers(0, 13)] + rng.integers(1, VOCAB, rng.integers(2, 8)).tolist() * 2)
        params.append(
            SamplingParams(
                temperature=float(rng.choice([0.0, 0.0, 0.8])),
                top_p=float(rng.choice([1.0, 0.9])),
                repetition_penalty=float(rng.choice([1.0, 1.0, 1.2])),
                seed=int(rng.integers(1000)),
                n=int(rng.choice([1, 1, 2])),
                stop_token_ids=rng.integers(1, VOCAB, rng.integers(0, 2)).tolist(),
                min_tokens=int(rng.choice([0, 8])),
                max_tokens=int(rng.integers(16, 31)),
                ignore_eos=True,
            )
        )
    return asked, params


def answers(llm: LLM, asked: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    return [list(completion.token_ids) for output in llm.generate(asked, params) for completion in output.outputs]


def watch_preemptions(llm: LLM) -> Counter[str]:
    """How many sequences lost their room, and how many of them with drafts that were planned or in flight."""
    engine: Any = llm.engine
    scheduler, seen = engine._parts.scheduler, Counter[str]()
    preempt = scheduler._preempt

    def watched(seq: Any, *rest: Any) -> Any:
        state = scheduler.state
        seen["all"] += 1
        seen["drafting"] += bool(seq.slot >= 0 and (state.drafts[seq.slot] or state.slack[seq.slot]))
        return preempt(seq, *rest)

    scheduler._preempt = watched
    return seen


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "synchronous"])
@pytest.mark.parametrize("speculative", ["suffix", "dspark"])
def test_preempted_sequences_say_what_they_say_with_room_and_without_drafts(
    made: tuple[Path, Path], plain: LLM, speculative: str, ahead: bool
) -> None:
    jobs = [random_job(seed) for seed in range(JOBS)]
    expected = [answers(plain, *job) for job in jobs]
    assert plain.stats().preemptions == 0
    with open_llm(made, speculative, kv_memory=KV_MEMORY[speculative], async_scheduling=ahead, **SMALL) as llm:
        engine: Any = llm.engine
        engine._parts.speculation.force(WIDTH)
        assert engine._parts.cache.num_blocks("kv") == BLOCKS + 1
        seen = watch_preemptions(llm)
        for job, said in zip(jobs, expected, strict=True):
            assert answers(llm, *job) == said
        stats = llm.stats()
        assert engine._parts.cache.stats().used_pages == 0
    assert stats.preemptions == seen["all"] >= 5
    assert seen["drafting"] >= 5
    assert stats.accepted_tokens > 50
    assert stats.drafted_tokens - stats.accepted_tokens > 50
