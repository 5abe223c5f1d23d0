"""V4.1's own draft in the native loop: windows, open pairs and global entries take rejected drafts back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepinfer_offline import LLM, SamplingParams
from deepinfer_offline.engine.base import EngineStartError
from deepinfer_offline.models.base import ModelOptions
from deepinfer_offline.models.deepsig_v41.model import DeepSigV41Model
from deepinfer_offline.models.deepsig_v41.session import Session
from deepinfer_offline.weights.source import resolve_model
from deepinfer_specdec import Draft

ORACLE = Path(__file__).parent / "data" / "v41-oracle"
GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
SAMPLED = SamplingParams(
    temperature=0.8, top_p=0.9, repetition_penalty=1.1, seed=4, n=2, max_tokens=12, ignore_eos=True
)
EXACT = {"window_strategy": "exact"}


def prompts(count: int = 9) -> list[list[int]]:
    """Prompts that share stems of 48 to 64 tokens, with ends of their own. The window is 8, and `exact` replays 42 tokens."""
    rng = np.random.default_rng(3)
    stems = [rng.integers(0, 70, 64).tolist() for _ in range(3)]
    return [stems[i % 3][: 48 + 2 * i] + rng.integers(0, 70, 2 + i % 4).tolist() for i in range(count)]


def open_llm(speculative: str, name: str = "dev-dspark", **options: Any) -> LLM:
    llm = LLM(ORACLE / name, dtype="float32", engine="native", speculative=speculative, **options)
    if speculative != "off":
        llm.engine._parts.speculation.force(5)  # pyrefly: ignore
    return llm


def drafter_of(llm: LLM) -> Any:
    return llm.engine._parts.speculation._following.drafter  # pyrefly: ignore


def answers(llm: LLM, params: SamplingParams, asked: list[list[int]] | None = None) -> list[list[int]]:
    return [list(c.token_ids) for out in llm.generate(asked or prompts(), params) for c in out.outputs]


class Prophet:
    """Stands in for the draws of the draft: often the token that plain decoding says next, else another one.

    A random draft is never right. This one is right for a changing number of columns, so that steps accept none, some, or all.
    """

    def __init__(self, llm: LLM, said: dict[tuple[int, ...], list[list[int]]]) -> None:
        self._scheduler: Any = llm.engine._parts.scheduler  # pyrefly: ignore
        self._said = said
        self._columns = 0
        drafter_of(llm)._choose = self.choose
        if (steps := llm.engine._parts.runner.ahead) is not None:  # pyrefly: ignore
            steps._choose = self.choose_ahead

    def choose(self, logits: torch.Tensor, rows: Any) -> torch.Tensor:
        found = []
        for slot, position in zip(rows.slots.tolist(), rows.positions.tolist(), strict=True):
            seq = self._scheduler.sequence(int(self._scheduler.state.seq_ids[slot]))
            prompt, place = seq.tokens[: seq.num_prompt], position - seq.num_prompt
            rest = [said for said in self._said[tuple(prompt)] if said[: seq.num_generated] == seq.output_tokens]
            assert rest, "a sequence left the answer of plain decoding"
            token = rest[0][place] if place < len(rest[0]) else 0
            found.append(token if (position + slot) % 4 else (token + 1) % 70)
        return torch.tensor(found)

    def choose_ahead(self, draws: Any, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The same where only the device knows what was said: its token buffer tells, before the first column is drafted."""
        params = draws._params
        slots = params.slots[draws._rows].tolist()
        if self._columns % 5 == 0:
            texts = [params.tokens[slot, :end].tolist() for slot, end in zip(slots, positions.tolist(), strict=True)]
            self._texts = [self._whole(text) for text in texts]
        self._columns += 1
        found = []
        for slot, position, text in zip(slots, positions.tolist(), self._texts, strict=True):
            token = text[position] if position < len(text) else 0
            found.append(token if (position + slot) % 4 else (token + 1) % 70)
        return torch.tensor(found)

    def _whole(self, text: list[int]) -> list[int]:
        """Prompt and answer that begin like this; a row that runs on after its end is left to itself."""
        for prompt, answers in self._said.items():
            for said in answers:
                whole = [*prompt, *said]
                if whole[: len(text)] == text[: len(whole)]:
                    return whole
        raise AssertionError("a sequence left the answer of plain decoding")


def told(llm: LLM, params: SamplingParams) -> dict[tuple[int, ...], list[list[int]]]:
    outputs = llm.generate(prompts(), params)
    return {tuple(p): [list(c.token_ids) for c in out.outputs] for p, out in zip(prompts(), outputs, strict=True)}


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with open_llm("off", enable_prefix_caching=False, **EXACT) as llm:
        yield llm


OPTIONS = {
    "batch 9": {"block_size": 1, "max_num_seqs": 9},
    "batch 1": {"block_size": 4, "max_num_seqs": 1},
    "small steps": {"block_size": 2, "max_num_seqs": 4, "max_num_batched_tokens": 20},
    "synchronous": {"block_size": 16, "max_num_seqs": 9, "async_scheduling": False},
}


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_tokens_equal_plain_decoding(plain: LLM, options: dict[str, Any], params: SamplingParams) -> None:
    """With prefix hits, replay after them, chunks, and none, some or all drafts accepted."""
    said = told(plain, params)
    with open_llm("dspark", **EXACT, **options) as llm:
        Prophet(llm, said)
        assert answers(llm, params) == [tokens for p in prompts() for tokens in said[tuple(p)]]
        stats = llm.stats()
        assert stats.cached_tokens > 100
    assert 0.3 * stats.drafted_tokens < stats.accepted_tokens < stats.drafted_tokens


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("decoder_replay", [True, False])
def test_bounded_replay_with_drafts_equals_it_without(block_size: int, decoder_replay: bool) -> None:
    """One prompt after the other, so that both meet the same hits."""
    options: dict[str, Any] = {"block_size": block_size, "max_num_seqs": 1, "decoder_replay": decoder_replay}
    with open_llm("off", **options) as llm:
        said = told(llm, GREEDY)
        hits = llm.stats().cached_tokens
    with open_llm("auto", **options) as llm:
        Prophet(llm, said)
        assert answers(llm, GREEDY) == [tokens for p in prompts() for tokens in said[tuple(p)]]
        assert llm.stats().cached_tokens == hits > 50
        assert llm.stats().accepted_tokens > 50
        assert llm.stats().extra["speculation"]["reason"] == "dspark: the checkpoint brings its own draft"


class Guesses:
    """A drafter for models without a draft: what plain decoding says next, every third token replaced."""

    name, max_draft = "guesses", 6

    def __init__(self, said: dict[tuple[int, ...], list[int]]) -> None:
        self._said, self._rows = said, dict[int, list[int]]()

    def begin(self, sequence: int, token_ids: Any) -> None:
        self._rows[sequence] = list(token_ids)

    def extend(self, sequence: int, token_ids: Any) -> None:
        self._rows[sequence] += list(token_ids)

    def end(self, sequence: int) -> None:
        del self._rows[sequence]

    def propose(self, sequences: Any, limits: Any = None, floor: float = 0.0) -> Draft:
        rows = []
        for sequence, limit in zip(sequences, limits.tolist(), strict=True):
            known = self._rows[sequence]
            rest = next([*p, *said] for p, said in self._said.items() if tuple(known[: len(p)]) == p)
            assert rest[: len(known)] == known, "a sequence left the answer of plain decoding"
            ahead = enumerate(rest[len(known) : len(known) + limit], len(known))
            rows.append([token if place % 3 else (token + 1) % 70 for place, token in ahead])
        return Draft.from_rows(rows, [[0.5] * len(row) for row in rows], self.max_draft)


@pytest.mark.parametrize("name", ["dev-engram", "dev-quant", "dev-replay"])
def test_drafts_of_any_kind_serve_a_checkpoint_without_a_draft(name: str) -> None:
    """`auto` takes suffix there. Engram reads the ids before a row, so rejected drafts must not stay in anybody's history."""
    asked, options = prompts(5), {"block_size": 4, "max_num_seqs": 3, **EXACT}
    with open_llm("off", name, **options) as llm:
        plain = answers(llm, GREEDY, asked)
    with open_llm("auto", name, **options) as llm:
        assert drafter_of(llm).name == "suffix"
        said = {tuple(prompt): tokens for prompt, tokens in zip(asked, plain, strict=True)}
        llm.engine._parts.speculation.force(6, Guesses(said))  # pyrefly: ignore
        assert answers(llm, GREEDY, asked) == plain
        stats = llm.stats()
    assert 0.2 * stats.drafted_tokens < stats.accepted_tokens < 0.8 * stats.drafted_tokens
    with pytest.raises(EngineStartError, match="brings no draft"):
        open_llm("dspark", name)


def whole_model(block_size: int) -> DeepSigV41Model:
    options = ModelOptions("cpu", torch.float32, 256, 8, 512, block_size)
    model = DeepSigV41Model.load(resolve_model(str(ORACLE / "dev-dspark")), options)
    model.decoder_replay = "off"
    model.start_drafting()
    return model


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_blocks_are_those_of_a_context_computed_at_once(plain: LLM, block_size: int, ahead: bool) -> None:
    """After hits, replay, chunks, accepted and rejected drafts: every confidence is that of one forward over the known tokens.

    The same checkpoint alone gives the oracle's numbers (test_v41_oracle.py), so these are the oracle's too. 1e-4 is float32 in
    another order; a stale or missing context row moves them by 1e-2 and more.
    """
    blocks: list[tuple[list[int], np.ndarray, np.ndarray]] = []
    options: dict[str, Any] = {"block_size": block_size, "async_scheduling": ahead, **EXACT}
    with open_llm("dspark", max_num_seqs=4, max_num_batched_tokens=24, **options) as llm:
        Prophet(llm, told(plain, GREEDY))
        drafter = drafter_of(llm)
        guess, scheduler = drafter.guess, drafter._scheduler

        def noted(sequences: list[int], tokens: np.ndarray, logits: np.ndarray) -> None:
            blocks.extend(zip([list(scheduler.sequence(s).tokens) for s in sequences], tokens, logits, strict=True))
            guess(sequences, tokens, logits)

        drafter.guess = noted
        answers(llm, GREEDY)
        assert llm.stats().cached_tokens > 0
    model = whole_model(block_size)
    worst = []
    for known, tokens, logits in blocks[::2]:
        session = Session(model, capacity=120)
        session.prefill(0, known[:-1], keep_all=True)
        given = torch.from_numpy(tokens)[None]
        block = model.draft_blocks(
            torch.tensor(known[-1:]),
            torch.tensor([len(known) - 1]),
            torch.from_numpy(session.tables["window"]).long(),
            session.cache,
            lambda _, column, given=given: given[:, column],
            len(known) - 1,
        )
        worst.append(float(np.abs(block.confidence[0].numpy() - logits).max()))
    assert len(worst) > 15
    assert max(worst) < 1e-4


def test_a_draft_reads_no_block_that_was_let_go_of() -> None:
    """Window 8, blocks of 4: the row at 11 reads from 4 on, so block 0 is gone; its draft would have liked position 3."""
    model = whole_model(4)
    assert model.draft is not None
    positions = torch.tensor([0, 5, 7, 8, 11, 12, 30])
    held = model.draft.held_from(positions)
    assert held.tolist() == [0, 0, 0, 0, 4, 4, 20]
    session = Session(model, capacity=64)
    ids = prompts()[5]
    session.prefill(0, ids, keep_all=True)
    table = torch.from_numpy(session.tables["window"]).long()

    def confidence(position: int, columns: torch.Tensor) -> torch.Tensor:
        anchors = torch.tensor([ids[position]])
        return model.draft_blocks(
            anchors, torch.tensor([position]), columns, session.cache, lambda x, _: x.argmax(-1), position
        ).confidence

    gone = table.clone()
    gone[:, 0] = 0  # what the table says of a block that was let go of
    assert torch.equal(confidence(11, table), confidence(11, gone))
    assert not torch.equal(confidence(10, table), confidence(10, gone))


def test_a_draft_model_is_refused() -> None:
    with pytest.raises(EngineStartError, match="brings its own draft"):
        open_llm("dspark", draft_model=ORACLE / "dev-dspark")
