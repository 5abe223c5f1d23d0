"""Steps: one prompt in any split, any company, any storage order gives the same logits and the same global entries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepinfer_offline.models.base import ModelOptions
from deepinfer_offline.models.deepsig_v41.model import DeepSigV41Model
from deepinfer_offline.models.deepsig_v41.session import Chunk, Session, whole_sequence_logits
from deepinfer_offline.weights.source import resolve_model
from hypothesis import given, settings
from hypothesis import strategies as st

ORACLE = Path(__file__).parent / "data" / "v41-oracle"
TOLERANCE = 1e-4
_MODELS: dict[tuple[str, int], DeepSigV41Model] = {}


def load(name: str, block_size: int = 4) -> DeepSigV41Model:
    key = (name, block_size)
    if key not in _MODELS:
        options = ModelOptions("cpu", torch.float32, 256, 8, 512, block_size)
        _MODELS[key] = DeepSigV41Model.load(resolve_model(str(ORACLE / name)), options)
        _MODELS[key].decoder_replay = "off"
    return _MODELS[key]


def prompt(name: str, i: int = 1) -> np.ndarray:
    return np.load(ORACLE / name / "cases.npz")[f"seq{i}_ids"]


def global_entries(session: Session, slot: int, tokens: int) -> list[torch.Tensor]:
    """The stored bytes of every compressed entry and index key of the slot's first `tokens` tokens."""
    model, found = session.model, []
    size = model.options.block_size
    for source in model.schedule.sources:
        last = torch.arange(tokens // source.ratio) * source.ratio + source.ratio - 1
        blocks = torch.from_numpy(session.tables["global"][slot]).long()[last // size]
        slots = blocks * -(-size // source.ratio) + last % size // source.ratio
        found += [session.cache.compressed[source.index][slots], session.cache.index_keys[source.index][slots]]
    return found


@settings(max_examples=25, deadline=None)
@given(st.data())
@pytest.mark.parametrize("name", ["dev-backbone", "dev-engram"])
def test_any_split_gives_the_same_logits_and_entries(name: str, data: st.DataObject) -> None:
    ids = prompt(name)
    cuts = data.draw(st.sets(st.integers(1, len(ids) - 1), max_size=8))
    sizes = np.diff([0, *sorted(cuts), len(ids)]).tolist()
    model = load(name, data.draw(st.sampled_from([1, 3, 4])))
    whole = Session(model, capacity=64)
    expected = whole.prefill(0, ids, keep_all=True, wanted=None)
    session = Session(model, capacity=64, seed=data.draw(st.integers(0, 99)))
    got = session.prefill(0, ids, sizes, keep_all=True, wanted=None)
    assert (got - expected).abs().max() <= TOLERANCE
    for one, other in zip(global_entries(session, 0, len(ids)), global_entries(whole, 0, len(ids)), strict=True):
        assert torch.equal(one, other)


def first_flip(whole: Session, other: Session, tokens: int) -> tuple[int, int]:
    """First position whose stored FP8 or FP4 codes differ (`tokens` without any), and how many bytes differ in all."""
    model, first, count = whole.model, tokens, 0
    ratios = [source.ratio for source in model.schedule.sources for _ in range(2)]
    pairs = list(zip(ratios, global_entries(whole, 0, tokens), global_entries(other, 0, tokens), strict=True))
    size, positions = model.options.block_size, torch.arange(tokens)
    slots = [torch.from_numpy(s.tables["window"][0]).long()[positions // size] * size + positions % size
             for s in (whole, other)]  # fmt: skip
    pairs += [(1, a[slots[0]], b[slots[1]]) for a, b in zip(whole.cache.window, other.cache.window, strict=True)]
    for ratio, one, two in pairs:
        flipped = one != two
        count += int(flipped.sum())
        if flipped.any():
            first = min(first, int(flipped.any(1).nonzero()[0]) * ratio + ratio - 1)
    return first, count


@pytest.mark.parametrize("name", ["dev-backbone", "dev-engram", "dev-quant"])
def test_logits_differ_only_after_a_flipped_code(name: str) -> None:
    """Random prompts, unlike the oracle's, meet values that lie on the border of two FP8 or FP4 codes.

    A chunk of another size sums in another order, 1e-7 apart, and such a value then takes the other code: a step of up to a third
    of the value, which no tolerance covers. So: up to the first flipped code every row is within the tolerance, and flips are
    rare. Counted over 16 runs of 60 tokens, some 20,000 stored bytes each: dev-backbone has flips in 6 runs, after which 112 of
    960 rows are beyond the tolerance (59 of them in one run whose second token flips), dev-engram in 1 run, 18 rows.
    """
    model, rng = load(name), np.random.default_rng(5)
    runs, flipped_runs, flipped_bytes, moved_rows = 16, 0, 0, 0
    for run in range(runs):
        if run % 2 == 0:
            ids = rng.integers(0, 78, 60)
            whole = Session(model, capacity=64)
            expected = whole.prefill(0, ids, keep_all=True, wanted=None)
        cuts = np.sort(rng.choice(np.arange(1, 60), rng.integers(1, 9), replace=False))
        session = Session(model, capacity=64, seed=1)
        got = session.prefill(0, ids, np.diff([0, *cuts, 60]).tolist(), keep_all=True, wanted=None)
        difference = (got - expected).abs().amax(1)
        first, count = first_flip(whole, session, 60)
        assert (difference[:first] <= TOLERANCE).all(), f"run {run}: rows differ before the first flip at {first}"
        flipped_runs, flipped_bytes = flipped_runs + (count > 0), flipped_bytes + count
        moved_rows += int((difference > TOLERANCE).sum())
    counted = f"{flipped_runs} of {runs} runs with flips, {flipped_bytes} bytes, {moved_rows} of {60 * runs} rows moved"
    assert flipped_runs <= runs // 2, counted
    assert moved_rows <= 60 * runs // 5, counted


@pytest.mark.parametrize("name", ["dev-backbone", "dev-engram", "dev-quant"])
def test_token_by_token_decode_equals_the_whole_sequence(name: str) -> None:
    model, ids = load(name), prompt(name, 0)
    expected = whole_sequence_logits(model, ids)
    session = Session(model, capacity=64)
    session.write(0, 0, ids)
    rows = [session.run(Chunk(0, 0, 5, keep_all=True, wanted=None))]
    rows += [session.run(Chunk(0, i, 1, prefill=False)) for i in range(5, len(ids))]
    assert (torch.cat(rows) - expected).abs().max() <= TOLERANCE


def test_any_company_gives_the_same_logits() -> None:
    """Prompt chunks, decode rows and verification rows of five sequences in one batch, against each one alone."""
    model = load("dev-engram")
    first, second = prompt("dev-engram", 0), prompt("dev-engram", 1)
    sequences = [first, second, second[::-1].copy(), first[::-1].copy(), np.roll(second, 7)]
    alone = [whole_sequence_logits(model, ids) for ids in sequences]
    session = Session(model, slots=5, capacity=64, seed=1)
    for slot, ids in enumerate(sequences):
        session.write(slot, 0, ids)
    done, rows = [0] * 5, [[] for _ in range(5)]
    plan = [
        (9, 1, 30, 3, 5),
        (1, 1, 10, 1, 1),
        (17, 30, 1, 6, 2),
        (1, 1, 1, 1, 1),
        (12, 12, 5, 20, 40),
        (8, 16, 14, 17, 12),
    ]
    for counts in plan:
        chunks = []
        for slot, count in enumerate(counts):
            count = min(count, len(sequences[slot]) - done[slot])
            if count:
                chunks.append(Chunk(slot, done[slot], count, keep_all=True, wanted=None))
                done[slot] += count
        out, start = session.run(*chunks), 0
        for chunk in sorted(chunks, key=lambda c: c.count != 1):
            rows[chunk.slot].append(out[start : start + chunk.count])
            start += chunk.count
    assert done == [len(ids) for ids in sequences]
    for got, expected in zip(rows, alone, strict=True):
        assert (torch.cat(got) - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("drafts_per_step", [4, 16])
def test_verification_rows_that_are_rejected_leave_no_trace(drafts_per_step: int) -> None:
    """Wrong drafts after each committed token: the next step starts right after the token that was kept."""
    model, ids = load("dev-engram"), prompt("dev-engram", 1)
    expected = whole_sequence_logits(model, ids)
    session = Session(model, capacity=80)
    session.prefill(0, ids[:10])
    generator = torch.Generator().manual_seed(0)
    for position in range(10, len(ids)):
        drafts = torch.randint(0, 250, (drafts_per_step,), generator=generator).tolist()
        session.write(0, position, [int(ids[position]), *drafts])
        rows = session.run(Chunk(0, position, 1 + drafts_per_step, prefill=False, wanted=None))
        assert (rows[0] - expected[position]).abs().max() <= TOLERANCE


def test_accepted_drafts_are_as_good_as_decoded_tokens() -> None:
    model, ids = load("dev-backbone"), prompt("dev-backbone", 1)
    expected = whole_sequence_logits(model, ids)
    session = Session(model, capacity=80)
    session.prefill(0, ids[:9])
    session.write(0, 0, ids)
    position = 9
    while position < len(ids):
        count = min(5, len(ids) - position)
        rows = session.run(Chunk(0, position, count, prefill=False, wanted=None))
        assert (rows - expected[position : position + count]).abs().max() <= TOLERANCE
        position += count


def test_slot_taken_over_by_another_sequence_starts_clean() -> None:
    """Everything that an earlier owner left (window, entries, open pairs, ids) must be invisible."""
    model = load("dev-engram")
    first, second = prompt("dev-engram", 0), prompt("dev-engram", 1)
    session = Session(model, capacity=64)
    session.prefill(0, first)
    expected = whole_sequence_logits(model, second)
    got = session.prefill(0, second, [7, 20, 34], keep_all=True, wanted=None)
    assert (got - expected).abs().max() <= TOLERANCE


def test_preempted_sequence_recomputes_the_same() -> None:
    model, ids = load("dev-backbone"), prompt("dev-backbone", 0)
    expected = whole_sequence_logits(model, ids)
    session = Session(model, slots=2, capacity=64)
    session.prefill(0, ids[:20])
    session.write(0, 0, ids)
    for position in range(20, 30):
        session.run(Chunk(0, position, 1, prefill=False))
    got = session.prefill(1, ids, [31, 17], keep_all=True, wanted=None)  # prompt and generated tokens, in another slot
    assert (got - expected).abs().max() <= TOLERANCE


def test_bfloat16_runs_and_stays_near_float32() -> None:
    """Not an accuracy claim: with random weights a flipped selection moves logits by O(1). Most rows must agree."""
    source = resolve_model(str(ORACLE / "dev-quant"))
    wide = load("dev-quant")
    narrow = DeepSigV41Model.load(source, ModelOptions("cpu", torch.bfloat16, 256, 8, 512, 4))
    ids = prompt("dev-quant", 0)
    got, expected = whole_sequence_logits(narrow, ids), whole_sequence_logits(wide, ids)
    assert got.dtype == torch.float32
    assert got.isfinite().all()
    assert (got - expected).abs().median() < 0.3


def test_model_without_global_keys_runs(tmp_path: Path) -> None:
    from deepinfer_offline.models.deepsig_v41.config import V41Config
    from deepinfer_offline.models.deepsig_v41.synthetic import random_tensors
    from deepinfer_offline.models.deepsig_v41.writer import write_checkpoint

    raw: dict[str, Any] = {
        "model_type": "deepsig_v41",
        "text_config": {
            "vocab_size": 64,
            "hidden_size": 32,
            "moe_intermediate_size": 16,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "head_dim": 24,
            "qk_rope_head_dim": 8,
            "index_head_dim": 8,
            "q_lora_rank": 16,
            "o_groups": 1,
            "o_lora_rank": 8,
            "sliding_window": 5,
            "compress_ratios": [0, 0, 0],
            "kv_source_layer_ids": [],
            "index_source_layer_ids": [],
            "candidate_source_layer_id": -1,
            "n_routed_experts": 3,
            "num_experts_per_tok": 2,
            "engram_layer_ids": [],
            "num_nextn_predict_layers": 0,
            "max_position_embeddings": 128,
        },
    }
    write_checkpoint(tmp_path, raw, random_tensors(V41Config.parse(raw)), dtype=torch.float32)
    model = DeepSigV41Model.load(resolve_model(str(tmp_path)), ModelOptions("cpu", torch.float32, 64, 2, 64, 4))
    assert [group.name for group in model.facts.cache_groups] == ["window"]
    ids = np.arange(30) % 64
    session = Session(model, capacity=64, seed=0)
    got = session.prefill(0, ids, [11, 1, 1, 17], keep_all=True, wanted=None)
    assert (got - whole_sequence_logits(model, ids)).abs().max() <= TOLERANCE
