"""Faults put in on purpose: each must move the numbers that the other tests compare, or those tests could not see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepinfer_offline.models.base import ModelOptions
from deepinfer_offline.models.deepsig_v41 import block as block_module
from deepinfer_offline.models.deepsig_v41.backbone import StepRows as BackboneRows
from deepinfer_offline.models.deepsig_v41.block import Residual
from deepinfer_offline.models.deepsig_v41.engram import EngramHash
from deepinfer_offline.models.deepsig_v41.model import DeepSigV41Model
from deepinfer_offline.models.deepsig_v41.session import Chunk, Session
from deepinfer_offline.models.deepsig_v41.stage import Frequencies
from deepinfer_offline.ops import deepsig as ops
from deepinfer_offline.weights.source import resolve_model

ORACLE = Path(__file__).parent / "data" / "v41-oracle"
VISIBLE = 1e-3  # the oracle's tolerance


def load(name: str) -> DeepSigV41Model:
    model = DeepSigV41Model.load(resolve_model(str(ORACLE / name)), ModelOptions("cpu", torch.float32, 128, 4, 128, 4))
    model.decoder_replay = "off"
    return model


def oracle_error(name: str, sizes: list[int] | None = None) -> float:
    """Largest difference to the oracle over its first prompt, run in chunks; infinite if a logit is NaN."""
    expected = np.load(ORACLE / name / "cases.npz")
    ids = expected["seq0_ids"]
    got = Session(load(name), capacity=64).prefill(0, ids, sizes, keep_all=True, wanted=None).numpy()
    return float("inf") if np.isnan(got).any() else float(np.abs(got - expected["seq0_logits"]).max())


def replay_error() -> tuple[float, bool]:
    """Error of the first replay case with a hit above the window, and whether shared entries were left alone."""
    expected = np.load(ORACLE / "dev-replay" / "cases.npz")
    ids, hit, window = expected["g8_ids"], int(expected["g8_hit"]), 8
    session = Session(load("dev-replay"), capacity=64)
    session.prefill(0, ids[:hit], keep_all=True)
    for pool in session.cache.window:
        pool.fill_(0x7F)  # NaN
    before = [pool.clone() for pool in session.cache.compressed.values()]
    session.write(0, 0, ids)
    rows = expected["g8_enc_rows"]
    start = hit - window
    chunk = Chunk(0, start, len(ids) - start, floor=start, write_floor=hit, wanted=len(ids) - int(rows[0]))
    got = session.run(chunk)[torch.from_numpy(rows - rows[0])].numpy()
    kept = True
    for source, pool in zip(session.model.schedule.sources, before, strict=True):
        entries = hit // source.ratio
        size = 4 // source.ratio
        slots = np.arange(entries) + size  # blocks of the only slot are 1, 2, ...
        kept = kept and torch.equal(session.cache.compressed[source.index][slots], pool[slots])
    error = float("inf") if np.isnan(got).any() else float(np.abs(got - expected["g8_enc_logits"]).max())
    return error, kept


def test_without_faults_everything_fits() -> None:
    assert oracle_error("dev-backbone") < 1e-4
    assert oracle_error("dev-engram", [5, 1, 20, 22]) < 1e-4
    error, kept = replay_error()
    assert error < 1e-4
    assert kept


def change_rows(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any]) -> None:
    original = BackboneRows.of.__func__  # pyrefly: ignore
    monkeypatch.setattr(BackboneRows, "of", classmethod(lambda cls, *args: change(original(cls, *args))))


def test_dropped_window_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    change_rows(monkeypatch, lambda rows: replace(rows, floors=np.zeros_like(rows.floors)))
    assert replay_error()[0] > VISIBLE


def test_replayed_entries_written(monkeypatch: pytest.MonkeyPatch) -> None:
    change_rows(monkeypatch, lambda rows: replace(rows, write_floors=np.zeros_like(rows.write_floors)))
    error, kept = replay_error()
    assert not kept
    assert error > VISIBLE


def test_truncated_engram_history(monkeypatch: pytest.MonkeyPatch) -> None:
    original = EngramHash.token_history

    def truncated(self: EngramHash, batch: Any, step: Any) -> torch.Tensor:
        history = original(self, batch, step)
        back = np.arange(history.shape[1])
        outside = step.host_positions[:, None] - back < step.first[step.owner][:, None]
        return history.masked_fill(torch.from_numpy(outside), self.pad)

    monkeypatch.setattr(EngramHash, "token_history", truncated)
    assert oracle_error("dev-engram", [5, 1, 20, 22]) > VISIBLE
    assert oracle_error("dev-engram") < 1e-4  # one whole chunk has nothing to truncate: only chunks can show the fault


def test_pre_mix_of_the_same_site(monkeypatch: pytest.MonkeyPatch) -> None:
    def same_site(residual: Residual, hyper: Any, norm: Any, config: Any, sublayer: Any) -> Residual:
        mix = ops.mhc_pre(
            residual.streams,
            hyper.fn,
            hyper.base,
            hyper.scale,
            iterations=config.hc_sinkhorn_iters,
            eps=config.hc_eps,
            norm_eps=config.rms_norm_eps,
        )
        collapsed = ops.mhc_collapse(residual.streams, mix.pre)
        output = sublayer(ops.rms_norm(collapsed, norm, config.rms_norm_eps))
        return Residual(ops.mhc_post(output, residual.streams, mix.post, mix.comb), mix.pre)

    from deepinfer_offline.models.deepsig_v41 import backbone

    monkeypatch.setattr(block_module, "site", same_site)
    monkeypatch.setattr(backbone, "site", same_site)
    assert oracle_error("dev-backbone") > VISIBLE


@pytest.mark.parametrize("field", ["plain", "compressed"])
def test_wrong_rope_theta(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    original = Frequencies.of.__func__  # pyrefly: ignore

    def swapped(cls: type[Frequencies], config: Any, device: str) -> Frequencies:
        right = original(cls, config, device)
        other = right.compressed if field == "plain" else right.plain
        return replace(right, **{field: other})

    monkeypatch.setattr(Frequencies, "of", classmethod(swapped))
    assert oracle_error("dev-backbone") > VISIBLE


def test_scaled_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ops.attend
    monkeypatch.setattr(
        ops, "attend", lambda q, keys, allowed, sink, scale: original(q, keys, allowed, sink * scale, scale)
    )
    assert oracle_error("dev-backbone") > VISIBLE


def test_ties_to_the_highest_index(monkeypatch: pytest.MonkeyPatch) -> None:
    mask, lowest = ops.topk_mask, ops.topk_lowest_index

    def highest(scores: torch.Tensor, k: int) -> torch.Tensor:
        found = lowest(scores.flip(-1), k)
        return torch.where(found >= 0, scores.shape[-1] - 1 - found, -1)

    monkeypatch.setattr(ops, "topk_mask", lambda scores, k: mask(scores.flip(-1), k).flip(-1))
    monkeypatch.setattr(ops, "topk_lowest_index", highest)
    expected = np.load(ORACLE / "dev-backbone" / "cases.npz")
    assert max(int(expected[f"seq{i}_ties_matter"]) for i in range(2)) == 1, (
        "no prompt of the oracle has a tie that matters"
    )
    i = next(i for i in range(2) if expected[f"seq{i}_ties_matter"])
    got = Session(load("dev-backbone"), capacity=64).prefill(0, expected[f"seq{i}_ids"], keep_all=True, wanted=None)
    assert np.abs(got.numpy() - expected[f"seq{i}_logits"]).max() > VISIBLE


def test_window_of_one_token_less(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepinfer_offline.models.deepsig_v41 import tiles

    original = tiles._window

    def narrow(step: Any, owner: Any, positions: Any, window: int) -> Any:
        slots, allowed = original(step, owner, positions, window)
        rows = np.arange(allowed.shape[1])
        allowed[:, rows, rows] = False  # the oldest key of each row
        return slots, allowed

    monkeypatch.setattr(tiles, "_window", narrow)
    assert oracle_error("dev-backbone") > VISIBLE
