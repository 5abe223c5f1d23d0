"""`LLM` on a tiny random Llama: order, errors that cost one item, equal answers with and without the asynchronous loop."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepinfer_offline import LLM, SamplingParams
from deepinfer_offline.engine.base import EngineStartError, RequestError
from deepinfer_offline.engine.options import OptionsError

VOCAB, CONTEXT = 320, 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with random weights and no tokenizer."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.3,
        eos_token_id=5,
    )
    path = tmp_path_factory.mktemp("tiny-llama")
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def make(folder: Path, **options: Any) -> LLM:
    defaults = {"dtype": "float32", "device": "cpu", "engine": "native", "kv_memory": "4MiB", "max_num_seqs": 8}
    return LLM(folder, **(defaults | options))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with make(folder) as made:
        yield made


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(6, VOCAB) for _ in range(count)]


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    rng = random.Random(1)
    prompts = [ids(rng, rng.randrange(1, 40)) for _ in range(30)]
    params = [SamplingParams(temperature=0, max_tokens=rng.randrange(1, 20)) for _ in prompts]
    outputs = llm.generate(prompts, params)
    assert [list(output.prompt_token_ids) for output in outputs] == prompts
    for prompt, one, output in zip(prompts, params, outputs, strict=True):
        alone = llm.generate([prompt], one)[0]
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids
        assert len(output.outputs[0].token_ids) <= one.max_tokens


def test_every_form_of_a_prompt(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3)
    forms = [[7, 8, 9], {"prompt_token_ids": [7, 8, 9]}, np.array([7, 8, 9]), (7, 8, 9)]
    answers = {tuple(output.outputs[0].token_ids) for output in llm.generate(forms, params)}
    assert len(answers) == 1
    (single,) = llm.generate([7, 8, 9], params)
    assert tuple(single.outputs[0].token_ids) in answers
    assert llm.generate([], params) == []


def test_a_bad_item_costs_that_item_only(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3)
    bad: list[Any] = ["text without a tokenizer", [], [VOCAB], [-1], [6] * CONTEXT, {"prompt": 3}, [1.5], None]
    outputs = llm.generate([[7, 8], *bad, [9]], params)
    assert len(outputs) == len(bad) + 2
    for output in outputs[1:-1]:
        assert isinstance(output.error, RequestError)
        assert output.outputs == []
    assert "has no tokenizer" in str(outputs[1].error)
    assert f"{CONTEXT} tokens; the context holds {CONTEXT}" in str(outputs[5].error)
    for output in (outputs[0], outputs[-1]):
        assert output.error is None
        assert len(output.outputs[0].token_ids) == 3
    assert not llm.engine.has_unfinished()


def test_chat_without_a_tokenizer_says_so(llm: LLM) -> None:
    (output,) = llm.chat([{"role": "user", "content": "hi"}])
    assert "no tokenizer" in str(output.error)
    outputs = llm.chat([[{"role": "user", "content": "hi"}], [{"role": "user", "content": "ho"}]])
    assert len(outputs) == 2


def test_stop_strings_need_a_tokenizer_and_params_must_match(llm: LLM) -> None:
    (output,) = llm.generate([[7, 8]], SamplingParams(stop="x"))
    assert output.error is not None
    assert output.error.param == "stop"
    with pytest.raises(
        TypeError, match=r"sampling_params must be SamplingParams\(...\), got dict \{'temperature': 0\}"
    ):
        llm.generate([1, 2], {"temperature": 0})  # pyrefly: ignore
    with pytest.raises(ValueError, match="2 sampling_params for 1 prompts"):
        llm.generate([[7, 8]], [SamplingParams(), SamplingParams()])


def test_an_answer_may_fill_the_context(llm: LLM) -> None:
    (output,) = llm.generate([[7, 8, 9]], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == CONTEXT - 3
    assert output.outputs[0].finish_reason == "length"


def test_an_interrupted_call_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, steps = llm.engine, []
    step = engine.step

    def interrupted() -> Any:
        steps.append(1)
        if len(steps) == 4:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[7, 8], [9]], SamplingParams(max_tokens=50, ignore_eos=True))
    monkeypatch.undo()
    assert not engine.has_unfinished()
    assert len(llm.generate([[7, 8]], SamplingParams(max_tokens=5, ignore_eos=True))[0].outputs[0].token_ids) == 5


def test_logits_equal_transformers_in_chunks(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = ids(random.Random(3), 100)
    with torch.inference_mode():
        wanted = reference(torch.tensor([tokens])).logits[0].numpy()
    with make(folder, max_num_batched_tokens=32) as llm:
        before = llm.generate([tokens[:40]], SamplingParams(temperature=0, max_tokens=4))[0]
        got = llm.logits(tokens)
        assert np.abs(got - wanted).max() < 1e-3
        again = llm.generate([tokens[:40]], SamplingParams(temperature=0, max_tokens=4))[0]
        assert again.outputs[0].token_ids == before.outputs[0].token_ids
        with pytest.raises(RequestError):
            llm.logits([VOCAB])


def random_job(rng: random.Random) -> tuple[list[list[int]], list[SamplingParams]]:
    shared = [ids(rng, 48) for _ in range(2)]
    prompts, params = [], []
    for _ in range(rng.randrange(1, 7)):
        prompts.append(rng.choice(shared)[: rng.randrange(49)] + ids(rng, rng.randrange(1, 20)))
        params.append(
            SamplingParams(
                n=rng.choice([1, 1, 2]),
                temperature=rng.choice([0.0, 0.8]),
                top_p=rng.choice([1.0, 0.9]),
                presence_penalty=rng.choice([0.0, 0.7]),
                seed=rng.randrange(100),
                stop_token_ids=ids(rng, 12),
                max_tokens=rng.randrange(1, 30),
                logprobs=rng.choice([None, 2]),
            )
        )
    return prompts, params


def test_200_random_jobs_are_the_same_with_and_without_the_asynchronous_loop(folder: Path) -> None:
    small = {
        "kv_memory": 90 << 10,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 24,
        "max_model_len": 128,
        "block_size": 4,
    }
    with make(folder, **small) as ahead, make(folder, async_scheduling=False) as lone:
        for job in range(200):
            prompts, params = random_job(random.Random(job))
            first, second = ahead.generate(prompts, params), lone.generate(prompts, params)
            for one, other in zip(first, second, strict=True):
                assert [a.token_ids for a in one.outputs] == [a.token_ids for a in other.outputs]
                assert [a.finish_reason for a in one.outputs] == [a.finish_reason for a in other.outputs]
                for mine, theirs in zip(one.outputs, other.outputs, strict=True):
                    if mine.logprobs is not None:
                        assert mine.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-3)
        assert ahead.stats().preemptions > 0
        assert ahead.stats().cached_tokens > 0


def test_start_errors_are_one_sentence(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match="no model"):
        LLM(tmp_path / "missing")
    with pytest.raises(EngineStartError, match="too little"):
        make(folder, kv_memory=10)
    with pytest.raises(EngineStartError, match=r"too little memory.*are there"):
        make(folder, kv_memory=1 << 50)
    with pytest.raises(EngineStartError, match=r"a step \d.*smaller --max-running.*are there"):
        make(folder, max_num_seqs=1 << 32)
    with pytest.raises(EngineStartError, match=f"--max-model-len {CONTEXT * 2} is more than the {CONTEXT}"):
        make(folder, max_model_len=CONTEXT * 2)
    with pytest.raises(EngineStartError, match=f"--max-model-len {CONTEXT} does not fit"):
        make(folder, kv_memory=64 << 10, max_model_len=CONTEXT)
    with pytest.raises(EngineStartError, match="--no-decoder-replay: every row passes every layer of tiny-llama"):
        make(folder, decoder_replay=False)
    with pytest.raises(OptionsError, match="dtype"):
        make(folder, dtype="int8")


def test_the_info_says_what_serves_slower_than_it_could(llm: LLM) -> None:
    """The C kernels compute bfloat16 only, so no machine has them serve float32."""
    assert [note.rpartition("(")[2] for note in llm.info.notes] == ["cpu-avx512-bf16: computes bfloat16, not float32)"]


def test_a_small_cache_shortens_the_context(folder: Path) -> None:
    with make(folder, kv_memory=64 << 10) as llm:
        assert llm.info.max_model_len == llm.info.kv_tokens < CONTEXT
        (output,) = llm.generate([[7]], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == llm.info.max_model_len - 1


def test_closing_twice_and_use_after_closing(folder: Path) -> None:
    llm = make(folder)
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate([[7]])


def test_the_progress_bar_shows_answers(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate([[7], [8], []], SamplingParams(max_tokens=2), use_tqdm=True)
    assert "3/3" in capfd.readouterr().out


def test_importing_the_package_does_not_import_torch() -> None:
    code = (
        "import sys, deepinfer_offline; assert 'torch' not in sys.modules; print(deepinfer_offline.SamplingParams().n)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "1"
