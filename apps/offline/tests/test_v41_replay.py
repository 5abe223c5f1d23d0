"""SWA bounded replay on both sides, against the oracle's numbers and against exactness where it must hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepinfer_offline.models.base import ModelOptions
from deepinfer_offline.models.deepsig_v41.model import DeepSigV41Model
from deepinfer_offline.models.deepsig_v41.replay import plan_trim
from deepinfer_offline.models.deepsig_v41.rows import StepRows
from deepinfer_offline.models.deepsig_v41.session import Chunk, Session
from deepinfer_offline.weights.source import resolve_model

FOLDER = Path(__file__).parent / "data" / "v41-oracle" / "dev-replay"
CASES = np.load(FOLDER / "cases.npz")
GROUPS = range(int(CASES["num_groups"]))
W, LAYERS, CUT = 8, 7, 4
TOLERANCE = 1e-4
NAN_BYTE = 0x7F  # E4M3 NaN
MODES = {
    "cold": "off",
    "enc": "off",
    "dec_paper": "paper",
    "dec_vllm": "vllm",
    "both_paper": "paper",
    "both_vllm": "vllm",
}
_MODELS: dict[tuple[str, int], DeepSigV41Model] = {}


def load(replay: str = "off", block_size: int = 4) -> DeepSigV41Model:
    key = (replay, block_size)
    if key not in _MODELS:
        options = ModelOptions("cpu", torch.float32, 256, 8, 512, block_size)
        _MODELS[key] = DeepSigV41Model.load(resolve_model(str(FOLDER)), options)
        _MODELS[key].decoder_replay = replay  # pyrefly: ignore
    return _MODELS[key]


def lose_windows(session: Session) -> None:
    """What a hit finds: shared entries, and windows and open pairs that hold anything."""
    for pool in session.cache.window:
        pool.fill_(NAN_BYTE)
    for ring in session.cache.rings.values():
        ring.fill_(float("nan"))


def after_hit(model: DeepSigV41Model, ids: np.ndarray, hit: int, seed: int = 0) -> Session:
    """A session whose slot 0 has the global entries of a cold run of `ids[:hit]`, and NaN wherever a window was."""
    session = Session(model, capacity=96, seed=seed)
    session.prefill(0, ids[:hit], keep_all=True)
    lose_windows(session)
    session.write(0, 0, ids)
    return session


def greedy(session: Session, logits: torch.Tensor, start: int, count: int = 8) -> list[int]:
    tokens = [int(logits.argmax())]
    for position in range(start, start + count - 1):
        session.write(0, position, tokens[-1:])
        tokens.append(int(session.run(Chunk(0, position, 1, prefill=False))[-1].argmax()))
    return tokens


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block_size", [1, 4])
def test_oracle_cases(mode: str, block_size: int) -> None:
    model, ran = load(MODES[mode], block_size), 0
    for g in GROUPS:
        if f"g{g}_{mode}_rows" not in CASES.files:
            continue
        ids, hit = CASES[f"g{g}_ids"], int(CASES[f"g{g}_hit"])
        hit = 0 if mode in ("cold", "dec_paper", "dec_vllm") or hit <= W else hit
        session = after_hit(model, ids, hit) if hit else Session(model, capacity=96, seed=0)
        if not hit:
            lose_windows(session)
            session.write(0, 0, ids)
        rows = CASES[f"g{g}_{mode}_rows"]
        floor = max(hit - W, 0)
        out = session.run(
            Chunk(0, floor, len(ids) - floor, floor=floor, write_floor=hit, wanted=len(ids) - int(rows[0]))
        )
        difference = (out[torch.from_numpy(rows - rows[0])].numpy() - CASES[f"g{g}_{mode}_logits"]).__abs__().max()
        assert difference <= TOLERANCE, f"group {g}, hit {hit}, {len(ids)} tokens"
        assert greedy(session, out[-1], len(ids)) == CASES[f"g{g}_{mode}_greedy"].tolist(), f"group {g}"
        ran += 1
    assert ran >= 4


def prompt(length: int = 70) -> np.ndarray:
    """A prompt that survives rounding noise: relative noise of 5e-7 on every linear output moves no logit by 5e-5, for hits of
    0, 9, 17, 40 and 41. Of 40 seeds 6 do; in the others an FP8 or FP4 code or a selection flips, which float32 cannot prevent.
    """
    return np.random.default_rng(24).integers(0, 78, length)


@pytest.mark.parametrize("hit", [57, 60, 61, 70])
def test_replay_of_every_layers_reach_is_exact(hit: int) -> None:
    """R = L (W - 1) rows rebuild every window exactly, for odd and even hits and for a hit of the whole prompt."""
    model, ids = load(), prompt()
    cold = Session(model, capacity=96)
    expected = cold.prefill(0, ids, keep_all=True, wanted=None)
    start = hit - LAYERS * (W - 1)
    session = after_hit(model, ids, hit)
    got = session.run(Chunk(0, start, len(ids) - start, floor=start, write_floor=hit, keep_all=True, wanted=None))
    fresh = max(hit, 1) - start - (1 if hit == len(ids) else 0)
    assert (got[fresh:] - expected[hit - (1 if hit == len(ids) else 0) :]).abs().max() <= TOLERANCE


def test_replay_of_one_window_is_not_exact_here() -> None:
    """The random model notices the truncation: otherwise the tests of exactness would prove nothing."""
    model, ids = load(), prompt()
    expected = Session(model, capacity=96).prefill(0, ids, keep_all=True, wanted=None)
    session = after_hit(model, ids, 60)
    got = session.run(Chunk(0, 52, 18, floor=52, write_floor=60, keep_all=True, wanted=None))
    assert (got[8:] - expected[60:]).abs().max() > 1e-2


@pytest.mark.parametrize("hit", [W + 1, 2 * W + 1, 40, 41])
@pytest.mark.parametrize("sizes", [(3,), (W,), (13,), (1, 1, 1, 4), (5, 5, 5)])
def test_chunk_boundaries_inside_the_replay_change_nothing(hit: int, sizes: tuple[int, ...]) -> None:
    model, ids = load(), prompt(60)
    start = hit - W
    whole = after_hit(model, ids, hit)
    expected = whole.run(Chunk(0, start, 60 - start, floor=start, write_floor=hit, keep_all=True, wanted=None))
    session = after_hit(model, ids, hit, seed=4)
    rows, position = [], start
    for size in (*sizes, 60 - start - sum(sizes)):
        rows.append(session.run(Chunk(0, position, size, floor=start, write_floor=hit, keep_all=True, wanted=None)))
        position += size
    assert (torch.cat(rows) - expected).abs().max() <= TOLERANCE


def entries_of(session: Session, tokens: int) -> list[torch.Tensor]:
    found = []
    size = session.model.options.block_size
    for source in session.model.schedule.sources:
        last = torch.arange(tokens // source.ratio) * source.ratio + source.ratio - 1
        blocks = torch.from_numpy(session.tables["global"][0]).long()[last // size]
        slots = blocks * -(-size // source.ratio) + last % size // source.ratio
        found += [session.cache.compressed[source.index][slots], session.cache.index_keys[source.index][slots]]
    return found


def test_global_entries_are_bit_identical_in_every_kind_of_prefill() -> None:
    ids = prompt(60)
    kept: list[list[torch.Tensor]] = []
    for replay, sizes in (
        ("off", [60]),
        ("off", [13, 1, 20, 26]),
        ("paper", [60]),
        ("vllm", [60]),
        ("paper", [30, 27, 3]),
    ):
        session = Session(load(replay), capacity=96)
        session.prefill(0, ids, sizes)
        kept.append(entries_of(session, 60))
    for other in kept[1:]:
        for a, b in zip(kept[0], other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("hit", [W + 1, 21, 32])
def test_replayed_rows_write_no_global_entry(hit: int) -> None:
    """The shared entries below the hit are overwritten with a mark; the replay must leave the mark."""
    model, ids = load(), prompt(50)
    session = after_hit(model, ids, hit)
    before = [e.clone() for e in entries_of(session, hit)]
    session.run(Chunk(0, hit - W, 50 - hit + W, floor=hit - W, write_floor=hit))
    after = entries_of(session, hit)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a, b)
    cold = Session(model, capacity=96)
    cold.prefill(0, ids, [hit, 50 - hit])
    assert all(len(a) == len(b) for a, b in zip(entries_of(session, 50), entries_of(cold, 50), strict=True))


@pytest.mark.parametrize("length", [1, W - 1, W])
@pytest.mark.parametrize("replay", ["paper", "vllm"])
def test_decoder_replay_is_exact_up_to_a_window(length: int, replay: str) -> None:
    ids = prompt(length)
    expected = Session(load(), capacity=96).prefill(0, ids)
    assert torch.equal(Session(load(replay), capacity=96).prefill(0, ids), expected)


@pytest.mark.parametrize("replay", ["paper", "vllm"])
def test_decoder_replay_keeps_every_row_on_request(replay: str) -> None:
    ids = prompt(40)
    expected = Session(load(), capacity=96).prefill(0, ids, keep_all=True, wanted=None)
    got = Session(load(replay), capacity=96).prefill(0, ids, keep_all=True, wanted=None)
    assert torch.equal(got, expected)


def test_trim_example_of_three_sequences() -> None:
    """[1, 300, 100] rows with a window of 128 keep [1, 128, 100]; the long one's floor is 172."""
    model = load()
    session = Session(model, slots=3, capacity=304)
    chunks = [Chunk(0, 0, 1), Chunk(1, 0, 300), Chunk(2, 0, 100)]
    batch = session.batch(chunks)
    trim = plan_trim(StepRows.of(batch, model.options.block_size), batch.host, 128)
    assert trim is not None
    assert len(trim.kept) == 229
    assert trim.floors.tolist() == [0, 172, 0]
    assert trim.kept.tolist() == [0, *range(173, 301), *range(301, 401)]


def test_decode_and_verification_rows_are_never_trimmed() -> None:
    session = Session(load("paper"), slots=2, capacity=96)
    session.prefill(0, prompt(20))
    batch = session.batch([Chunk(0, 20, 12, prefill=False)])
    assert plan_trim(StepRows.of(batch, 4), batch.host, W) is None


def test_short_last_chunk_reads_the_tail_of_the_trimmed_one() -> None:
    """[57, 3] and [30, 27, 3] agree: the last chunk is not trimmed, and its windows have no holes."""
    model, ids = load("paper"), prompt(60)
    rows = []
    for sizes in ([57, 3], [30, 27, 3]):
        session = Session(model, capacity=96, seed=1)
        lose_windows(session)
        rows.append(session.prefill(0, ids, sizes)[-1])
    assert rows[0].isfinite().all()
    assert (rows[0] - rows[1]).abs().max() <= TOLERANCE


def test_layer_tokens_fall_to_the_stated_cost() -> None:
    """N * L without decoder replay; N * cut + W * (L - cut) with it."""
    counted: dict[str, Any] = {}
    for replay in ("off", "paper", "vllm"):
        model = load(replay)
        before = model.counters.layer_tokens
        Session(model, capacity=96).prefill(0, prompt(70))
        counted[replay] = model.counters.layer_tokens - before
    assert counted == {
        "off": 70 * LAYERS,
        "paper": 70 * CUT + W * (LAYERS - CUT),
        "vllm": 70 * CUT + W * (LAYERS - CUT),
    }


def test_mixed_batch_with_hits_and_trims_equals_each_alone() -> None:
    model = load("paper")
    alone, together = [], Session(model, slots=4, capacity=96, seed=9)
    prompts = [prompt(60), prompt(45)[::-1].copy(), prompt(30), prompt(12)]
    hits = [40, 0, 21, 0]
    chunks = []
    for slot, (ids, hit) in enumerate(zip(prompts, hits, strict=True)):
        start = max(hit - W, 0)
        chunk = {"floor": start, "write_floor": hit}
        session = after_hit(model, ids, hit) if hit else Session(model, capacity=96)
        session.write(0, 0, ids)
        alone.append(session.run(Chunk(0, start, len(ids) - start, **chunk))[-1])
        if hit:
            together.prefill(slot, ids[:hit], keep_all=True)
        together.write(slot, 0, ids)
        chunks.append(Chunk(slot, start, len(ids) - start, **chunk))
    lose_windows(together)
    got = together.run(*chunks)
    for a, b in zip(alone, got, strict=True):
        assert (a - b).abs().max() <= TOLERANCE


@pytest.mark.parametrize("strategy", ["full", "periodic(64)", "exact", "bounded"])
def test_decoder_replay_follows_the_window_strategy(strategy: str) -> None:
    """Only `bounded` may leave windows of the decoder layers incomplete."""
    model = DeepSigV41Model.load(resolve_model(str(FOLDER)), ModelOptions("cpu", torch.float32, 64, 1, 64, 4))
    assert model.decoder_replay == "paper"
    model.follow_strategy(strategy, decoder_replay=True)
    assert model.decoder_replay == ("paper" if strategy == "bounded" else "off")
    model.follow_strategy(strategy, decoder_replay=False)
    assert model.decoder_replay == "off"
    with pytest.raises(ValueError, match="must be one of paper, vllm, off"):
        model.decoder_replay = "half"  # pyrefly: ignore
