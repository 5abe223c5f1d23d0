"""DSpark drafts beside a Llama target: a draft trained here for a tiny random model, in the native loop."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from deepinfer_offline import LLM, SamplingParams  # noqa: E402
from deepinfer_offline.engine.base import EngineStartError, Request  # noqa: E402
from deepinfer_offline.engine.native.ahead_step import AheadSteps  # noqa: E402
from deepinfer_offline.engine.options import EngineOptions, OptionsError  # noqa: E402
from deepinfer_offline.ops.attention.portable import TorchAttention  # noqa: E402
from deepinfer_offline.ops.registry import Provider, anywhere, registry  # noqa: E402
from deepinfer_offline.ops.rope import apply_rope  # noqa: E402
from deepinfer_specdec.dspark import DSparkDrafter, load_draft  # noqa: E402
from deepinfer_specdec.train.target import TransformersTarget  # noqa: E402
from tiny_dspark import VOCAB, WIDTH, make_target  # noqa: E402

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def open_llm(made: tuple[Path, Path], speculative: str = "dspark", **options: Any) -> LLM:
    """float32: in bfloat16 a near-tie may fall differently in another batch shape, with or without drafts."""
    draft = {"draft_model": made[1]} if speculative in ("dspark", "auto") else {}
    llm = LLM(made[0], dtype="float32", engine="native", speculative=speculative, **draft, **options)
    if speculative != "off":
        speculation_of(llm).force(WIDTH)  # every draft, even where this machine's clock says it does not pay
    return llm


def speculation_of(llm: LLM) -> Any:
    return llm.engine._parts.speculation  # pyrefly: ignore


def drafter_of(llm: LLM) -> Any:
    return speculation_of(llm)._following.drafter


def prompts(count: int = 24) -> list[list[int]]:
    """They share stems of up to 40 tokens."""
    rng = np.random.default_rng(7)
    stems = [rng.integers(1, VOCAB, 40).tolist() for _ in range(3)]
    return [stems[i % 3][: 8 + i] + rng.integers(1, VOCAB, 2 + i % 5).tolist() for i in range(count)]


def answers(llm: LLM, params: SamplingParams, asked: list[list[int]] | None = None) -> list[list[int]]:
    outputs = llm.generate(asked or prompts(), params)
    return [list(completion.token_ids) for output in outputs for completion in output.outputs]


@pytest.fixture(scope="module")
def plain(made: tuple[Path, Path]) -> Iterator[LLM]:
    with open_llm(made, "off") as llm:
        yield llm


PARAMS = {
    "greedy": GREEDY,
    "sampled": SamplingParams(temperature=0.9, top_p=0.9, min_p=0.01, seed=5, n=3, max_tokens=20, ignore_eos=True),
    "penalties": SamplingParams(
        temperature=0.6, repetition_penalty=1.2, frequency_penalty=0.3, seed=1, max_tokens=20, ignore_eos=True
    ),
    "stops": SamplingParams(temperature=0, stop_token_ids=[3, 11, 40], max_tokens=30, min_tokens=4),
}


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 32},
        {"max_num_seqs": 1},
        {"max_num_seqs": 8, "block_size": 4, "max_num_batched_tokens": 24},
        {"max_num_seqs": 16, "async_scheduling": False, "enable_prefix_caching": False},
    ],
    ids=["batch 32", "batch 1", "chunks", "synchronous"],
)
def test_tokens_equal_plain_decoding(
    made: tuple[Path, Path], plain: LLM, params: SamplingParams, options: dict[str, Any]
) -> None:
    with open_llm(made, **options) as llm:
        assert answers(llm, params) == answers(plain, params)
        stats = llm.stats()
    assert stats.accepted_tokens > 0.05 * stats.drafted_tokens > 0


class BoundsAttention(TorchAttention):
    """Attention from the device's tensors alone, as an accelerator's kernels compute it; a row of keys for every token."""

    takes_bounds = True

    def prepare(self, batch: Any, rope: torch.Tensor) -> Any:
        size, table = self.shape.block_size, batch.block_tables["kv"].long()
        rows = torch.searchsorted(batch.query_starts[1:].long(), torch.arange(len(batch.positions)), right=True)
        places = table[rows, batch.positions // size] * size + batch.positions % size
        kept = batch.positions >= batch.write_floors[rows]
        seen = torch.arange(table.shape[1] * size) <= batch.positions[:, None]
        return rope[batch.positions], torch.where(kept, places, batch.positions % size), table[rows], seen

    def __call__(self, qkv: torch.Tensor, cache: torch.Tensor, prepared: Any, *norms: Any) -> torch.Tensor:
        (rope, places, blocks, seen), s = prepared, self.shape
        q, k, v = qkv.view(len(qkv), -1, s.head_dim).split([s.num_heads, s.num_kv_heads, s.num_kv_heads], dim=1)
        q, k = apply_rope(q, rope), apply_rope(k, rope)
        for pool, new in zip(cache, (k, v), strict=True):
            pool.flatten(1, 2).index_copy_(1, places, new.transpose(0, 1))
        keys, values = cache[:, :, blocks].flatten(3, 4).repeat_interleave(s.group_size, dim=1)  # [2, heads, T, S, d]
        scores = torch.einsum("thd,htsd->hts", q, keys) * s.scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hts,htsd->thd", weights, values).flatten(1)


@pytest.mark.parametrize("params", [PARAMS["sampled"], PARAMS["penalties"]], ids=["sampled", "penalties"])
def test_target_and_draft_need_no_number_of_the_hosts(
    made: tuple[Path, Path], plain: LLM, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an attention that takes lengths from the device, the host's batch holds bounds, and no tensor is read in a step."""
    expected, inside, steps = answers(plain, params), threading.local(), []
    monkeypatch.setattr(registry, "select", lambda *a, select=registry.select, **k: bounded(select, *a, **k))
    run_step = AheadSteps._run

    def watched(self: Any, *args: Any) -> Any:
        inside.step = True
        steps.append(1)
        try:
            return run_step(self, *args)
        finally:
            inside.step = False

    monkeypatch.setattr(AheadSteps, "_run", watched)
    for name in ("numpy", "tolist", "cpu", "item", "__bool__", "__int__", "__index__"):
        read = getattr(torch.Tensor, name)

        def guarded(self: torch.Tensor, *args: Any, name: str = name, read: Any = read) -> Any:
            assert not getattr(inside, "step", False), f"the step's thread reads a tensor with {name}"
            return read(self, *args)

        monkeypatch.setattr(torch.Tensor, name, guarded)
    with open_llm(made, max_num_seqs=8, block_size=4, max_num_batched_tokens=40) as llm:
        assert isinstance(llm.engine._parts.runner.model.ops.attention, BoundsAttention)  # pyrefly: ignore
        assert answers(llm, params) == expected
    assert len(steps) > 20


def bounded(select: Any, op: str, *args: Any, **named: Any) -> Any:
    """The registry's choice, except for attention."""
    if op != "paged_attention":
        return select(op, *args, **named)
    return Provider("paged_attention", "bounds", "portable", anywhere, lambda: BoundsAttention)


def test_drafts_save_steps_and_the_report_counts_them(made: tuple[Path, Path], plain: LLM) -> None:
    with open_llm(made, "auto") as llm:
        before = plain.stats().steps
        assert answers(llm, GREEDY) == answers(plain, GREEDY)
        assert llm.stats().steps < plain.stats().steps - before
        report = llm.stats().extra["speculation"]
    assert report["drafter"] == "dspark"
    assert "--draft-model" in report["reason"]
    assert report["accepted_length"] > 1.3


def test_logprobs_describe_the_verified_tokens(made: tuple[Path, Path], plain: LLM) -> None:
    """float32 sums over another batch shape: 1e-3 on a log-probability."""
    params = SamplingParams(temperature=0, max_tokens=16, logprobs=2, ignore_eos=True)
    found = []
    with open_llm(made) as llm:
        for one in (llm, plain):
            completions = [out.outputs[0] for out in one.generate(prompts(6), params)]
            assert all([e.chosen.token_id for e in c.logprobs] == list(c.token_ids) for c in completions)
            found.append([e.chosen.logprob for c in completions for e in c.logprobs])
    assert found[0] == pytest.approx(found[1], abs=1e-3)


def record(llm: LLM) -> list[tuple[list[int], list[int], np.ndarray]]:
    """From now on: (tokens up to the anchor, drafted tokens, raw confidences) of every block."""
    drafter, blocks = drafter_of(llm), []
    guess, scheduler = drafter.guess, drafter._scheduler

    def noted(sequences: list[int], tokens: np.ndarray, logits: np.ndarray) -> None:
        known = [list(scheduler.sequence(sequence).tokens) for sequence in sequences]
        blocks.extend(zip(known, tokens.tolist(), logits, strict=True))
        guess(sequences, tokens, logits)

    drafter.guess = noted
    return blocks


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize(("window", "gathered"), [(0, 1 << 26), (6, 1 << 26), (0, 500)])
def test_blocks_are_those_of_a_drafter_with_a_context_of_its_own(
    made: tuple[Path, Path], tmp_path: Path, window: int, gathered: int, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After prefix hits, chunks and rejected drafts, against the library's drafter fed with transformers' hidden states.

    Two implementations of target and context in float32: confidences within 1e-3, and the same tokens.
    """
    monkeypatch.setattr("deepinfer_offline.models.llama.draft._MAX_GATHERED", gathered)  # all rows, or one at a time
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes((made[1] / "model.safetensors").read_bytes())
    config = json.loads((made[1] / "config.json").read_text())
    config |= {"sliding_window": window, "use_sliding_window": bool(window)}
    (folder / "config.json").write_text(json.dumps(config))
    options = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 20, "async_scheduling": ahead}
    with open_llm((made[0], folder), **options) as llm:
        blocks = record(llm)
        answers(llm, GREEDY, prompts(12))
        assert llm.stats().cached_tokens > 40
    model = load_draft(folder)
    target = TransformersTarget(made[0], "cpu", torch.float32, model.config.taps)
    other = DSparkDrafter(model, target.parts)
    assert len(blocks) > 100
    for known, tokens, logits in blocks[::5]:
        other.begin(0, known)
        other.observe(0, 0, target.run(torch.tensor([known[:-1]]))[0][0])
        assert other.propose([0]).token_ids[0].tolist() == tokens
        np.testing.assert_allclose(other.confidence_logits[0], logits, atol=1e-3)


def test_a_preempted_sequence_drafts_on(made: tuple[Path, Path], plain: LLM) -> None:
    asked = prompts(3)
    with open_llm(made, block_size=4, max_num_seqs=3) as llm:
        engine: Any = llm.engine
        blocks = record(llm)
        for number, ids in enumerate(asked):
            engine.add_request(Request(str(number), ids, GREEDY))
        found: dict[str, list[int]] = {}
        for step in range(1000):
            if not engine.has_unfinished():
                break
            found |= {out.request_id: list(out.outputs[0].token_ids) for out in engine.step()}
            running = [seq for seq in (answer.seq for answer in engine._answers.values()) if seq.slot >= 0]
            if step in (3, 6) and running:
                engine._parts.scheduler.preempt(running[0].seq_id)
        assert llm.stats().preemptions == 2
    assert [found[str(number)] for number in range(3)] == answers(plain, GREEDY, asked)
    # The same place was drafted before and after: the context that was computed again gives the same block.
    first: dict[tuple[int, ...], np.ndarray] = {}
    again = [(first[tuple(k)], c) for k, _, c in blocks if first.setdefault(tuple(k), c) is not c]
    for one, two in again:
        np.testing.assert_allclose(one, two, atol=1e-4)


def test_drafting_for_nothing_leaves_no_trace(
    made: tuple[Path, Path], plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While speculation is off blocks are drafted beside a step in flight; penalties read the buffer that drafts pass through."""
    params = SamplingParams(temperature=0.7, repetition_penalty=1.3, seed=3, max_tokens=40, ignore_eos=True)
    with LLM(made[0], dtype="float32", engine="native", speculative="dspark", draft_model=made[1]) as llm:
        engine: Any = llm.engine
        drafter = drafter_of(llm)
        landed, calls = engine._parts.speculation.landed, []
        monkeypatch.setattr(type(engine._parts.speculation), "synchronous", False)  # it stays off, by no clock
        engine._parts.speculation._probe = lambda *_: None

        def drafting(result: Any, live: Any) -> None:
            landed(result, live)
            rows = [a.seq for a in engine._answers.values() if a.seq.slot >= 0 and len(a.seq.tokens) > a.seq.num_prompt]
            if rows:
                calls.append(drafter.propose([seq.seq_id for seq in rows]))

        engine._parts.speculation.landed = drafting
        assert answers(llm, params) == answers(plain, params)
        assert len(calls) > 10


def test_first_pairs_follow_the_targets_distribution(made: tuple[Path, Path]) -> None:
    """3,000 answers against probabilities that transformers computes. Chi-square with a 1e-4 chance of failing a right engine.

    The seed is fixed, so the test does not flicker.
    """
    draws, prompt = 3000, prompts(1)[0]
    target = TransformersTarget(made[0], "cpu", torch.float32, (0,))

    def distribution(ids: list[int]) -> dict[int, float]:
        logits = target.run(torch.tensor([ids]))[1][0, -1] @ target.parts.head.T
        values, kept = logits.topk(3)
        return dict(zip(kept.tolist(), (values / 1.5).softmax(-1).tolist(), strict=True))

    expected = {(a, b): p * q for a, p in distribution(prompt).items() for b, q in distribution([*prompt, a]).items()}
    params = SamplingParams(temperature=1.5, top_k=3, n=30, max_tokens=4, seed=11, ignore_eos=True)
    with open_llm(made, max_num_seqs=64) as llm:
        seen: dict[tuple[int, int], int] = dict.fromkeys(expected, 0)
        for first in range(0, draws, 30 * 20):
            many = [SamplingParams(**{**vars_of(params), "seed": first + k}) for k in range(20)]
            for out in llm.generate([prompt] * 20, many):
                for completion in out.outputs:
                    seen[tuple(completion.token_ids[:2])] += 1
        assert llm.stats().accepted_tokens > 100
    statistic = sum((seen[k] - draws * p) ** 2 / (draws * p) for k, p in expected.items())
    assert sum(seen.values()) == draws
    assert statistic < 33.7  # 8 degrees of freedom, the 1e-4 quantile is 31.8; a little for the float32 probabilities


def vars_of(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in ("temperature", "top_k", "n", "max_tokens", "seed", "ignore_eos")}


def test_calibration_starts_from_the_trainers_file_and_learns(made: tuple[Path, Path]) -> None:
    stored = json.loads((made[1] / "sts.json").read_text())["temperatures"]
    with open_llm(made) as llm:
        calibration = drafter_of(llm).calibration
        assert calibration.scaling.temperatures.tolist() == stored
        calibration._refit_every = 64
        answers(llm, GREEDY)
        assert calibration._seen >= 64
        assert calibration.scaling.temperatures.tolist() != stored


def test_what_does_not_fit_is_refused_by_name(made: tuple[Path, Path], tmp_path: Path) -> None:
    small = make_target(tmp_path / "small", num_hidden_layers=2)
    for folder, options, words in (
        (small, {"speculative": "dspark", "draft_model": made[1]}, "num_target_layers 3; this one's is 2"),
        (
            made[0],
            {"speculative": "auto", "draft_model": tmp_path / "nothing"},
            "it is not a folder with a config.json",
        ),
        (made[0], {"speculative": "dspark"}, "give one with --draft-model"),
    ):
        with pytest.raises(EngineStartError, match=words):
            LLM(folder, engine="native", **options)
    with pytest.raises(OptionsError, match="--draft-model"):
        EngineOptions(draft_model=made[1])


def test_pages_of_a_store_bring_the_context_along(made: tuple[Path, Path], plain: LLM, tmp_path: Path) -> None:
    """The second engine starts from stored pages and drafts what the first one did; pages without that context are not read."""
    found = []
    for _ in range(2):
        with open_llm(made, kv_store=tmp_path, block_size=4, max_num_seqs=1) as llm:
            blocks = record(llm)
            assert answers(llm, GREEDY, prompts(4)) == answers(plain, GREEDY, prompts(4))
            loaded = llm.stats().extra["kv_store"]["loaded_pages"]
            found.append({tuple(known): logits for known, _, logits in blocks})
    assert loaded >= 4
    for known, logits in found[1].items():
        np.testing.assert_allclose(logits, found[0][known], atol=1e-4)
    with open_llm(made, "off", kv_store=tmp_path, block_size=4) as llm:
        answers(llm, GREEDY, prompts(4))
        assert llm.stats().extra["kv_store"]["loaded_pages"] == 0


def test_memory_counts_the_draft(made: tuple[Path, Path]) -> None:
    with open_llm(made, kv_memory="4MiB") as llm, open_llm(made, "off", kv_memory="4MiB") as other:
        runner: Any = llm.engine._parts.runner  # pyrefly: ignore
        facts = runner.model.facts
        pools = sum(pool.numel() * pool.element_size() for pool in runner.cache.draft)
        assert pools == 2 * 2 * 8 * 4 * (llm.engine.info.kv_tokens + facts.cache_groups[0].block_size)
        assert llm.engine.info.kv_tokens < other.engine.info.kv_tokens
        weights = sum(p.numel() * 4 for p in load_draft(made[1]).parameters())
        assert llm.engine.info.weight_bytes - other.engine.info.weight_bytes == weights
