"""V4.1 against numbers of an independent implementation (data/v41-oracle/*/README.md says how they were made).

The stated tolerance is 1e-3 on every value. Float32 noise alone is below 2e-5 here, so the bar of these tests is 1e-4: no
rounding of a cache entry and no selection may differ.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepinfer_offline.models.base import ModelOptions
from deepinfer_offline.models.deepsig_v41.checkpoint import FolderReader, engram_token_map
from deepinfer_offline.models.deepsig_v41.loader import WeightLoader
from deepinfer_offline.models.deepsig_v41.model import DeepSigV41Model, V41Parts
from deepinfer_offline.models.deepsig_v41.session import Chunk, Session, whole_sequence_logits
from deepinfer_offline.weights.source import resolve_model

ORACLE = Path(__file__).parent / "data" / "v41-oracle"
TOLERANCE = 1e-4


def load(name: str, block_size: int = 16) -> DeepSigV41Model:
    options = ModelOptions("cpu", torch.float32, 256, 8, 512, block_size)
    return DeepSigV41Model.load(resolve_model(str(ORACLE / name)), options)


def cases(name: str) -> Any:
    return np.load(ORACLE / name / "cases.npz")


def assert_close(got: torch.Tensor, expected: np.ndarray) -> None:
    assert got.shape == expected.shape
    assert np.abs(got.numpy() - expected).max() <= TOLERANCE
    top = np.sort(expected, axis=-1)
    clear = top[..., -1] - top[..., -2] > 2e-3
    assert (got.numpy().argmax(-1) == expected.argmax(-1))[clear].all()


@pytest.mark.parametrize("name", ["dev-backbone", "dev-engram", "dev-quant"])
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_logits_of_every_position(name: str, block_size: int) -> None:
    model, expected = load(name, block_size), cases(name)
    for i in range(2):
        assert_close(whole_sequence_logits(model, expected[f"seq{i}_ids"]), expected[f"seq{i}_logits"])


def test_dequantised_weights_are_exact() -> None:
    source, expected = resolve_model(str(ORACLE / "dev-quant")), cases("dev-quant")
    parts = V41Parts.of(source.config, 16)
    loader = WeightLoader(FolderReader(source), parts.config, parts.schedule, dtype=torch.float32)
    names = [name.removeprefix("dequant.") for name in expected.files if name.startswith("dequant.")]
    assert len(names) == 5
    for name in names:
        assert np.array_equal(loader.dense(name).numpy(), expected[f"dequant.{name}"])


def test_experts_that_stay_packed_compute_the_same() -> None:
    source, expected = resolve_model(str(ORACLE / "dev-quant")), cases("dev-quant")
    parts = V41Parts.of(source.config, 16)
    options = ModelOptions("cpu", torch.float32, 256, 8, 512, 16)
    loader = WeightLoader(FolderReader(source), parts.config, parts.schedule, dtype=torch.float32, keep_fp4=True)
    weights = loader.load()
    assert weights.layers[0].moe.experts.gate_up.dtype == torch.int8
    model = DeepSigV41Model(parts, weights, options)
    assert_close(whole_sequence_logits(model, expected["seq0_ids"]), expected["seq0_logits"])


def test_engram_token_map_and_rows_are_exact() -> None:
    model, expected = load("dev-engram"), cases("dev-engram")
    source = resolve_model(str(ORACLE / "dev-engram"))
    found = engram_token_map(source, model.config)
    assert np.array_equal(found, expected["token_map"])
    engram = model.backbone.engram
    assert engram is not None
    for i in range(2):
        ids = expected[f"seq{i}_ids"]
        session = Session(model, capacity=len(ids))
        session.write(0, 0, ids)
        batch = session.batch([Chunk(0, 0, len(ids))])
        from deepinfer_offline.models.deepsig_v41.rows import StepRows

        history = engram.token_history(batch, StepRows.of(batch, 16))
        for table, layer in enumerate(model.config.engram_layer_ids):
            rows = engram.rows(table, history)
            assert np.array_equal(rows.numpy(), expected[f"seq{i}_engram_rows_layer{layer}"])


@pytest.fixture(scope="module")
def drafted() -> tuple[Any, Any, torch.Tensor, torch.Tensor]:
    """The whole prompt in slot 0, its first five tokens in slot 1, and a draft for both anchors in one batch."""
    model, expected = load("dev-dspark"), cases("dev-dspark")
    assert model.draft is not None
    model.drafting = True
    ids = expected["prompt_ids"]
    session = Session(model, slots=2, capacity=64, seed=3)
    session.write(0, 0, ids)
    session.write(1, 0, ids[:5])
    batch = session.batch([Chunk(0, 0, len(ids), keep_all=True, wanted=None)])
    with torch.no_grad():
        result = model.backbone.forward(batch, session.cache)
        model.draft.write_context(result, session.cache)
        logits = model.logits(result.hidden)
        session.run(Chunk(1, 0, 5))
        block = model.draft.propose(
            torch.tensor([int(expected["a0_token"]), int(expected["a1_token"])]),
            torch.tensor([int(expected["a0_position"]), int(expected["a1_position"])]),
            torch.from_numpy(session.tables["window"]).long(),
            torch.zeros(2, dtype=torch.long),
            session.cache,
        )
    assert result.features is not None
    return expected, block, logits, result.features


def test_draft_target_logits_and_features(drafted: Any) -> None:
    expected, _, logits, features = drafted
    assert_close(logits, expected["target_logits"])
    assert np.abs(features.numpy() - expected["target_features"]).max() <= TOLERANCE


@pytest.mark.parametrize("anchor", [0, 1])
def test_draft_block(drafted: Any, anchor: int) -> None:
    expected, block, _, _ = drafted
    assert block.tokens[anchor].tolist() == expected[f"a{anchor}_greedy_tokens"].tolist()
    for got, name in (
        (block.logits, "greedy_logits"),
        (block.confidence, "greedy_confidence_prenorm"),
        (block.hidden, "hidden_prenorm"),
    ):
        assert np.abs(got[anchor].numpy() - expected[f"a{anchor}_{name}"]).max() <= TOLERANCE


@pytest.mark.parametrize("anchor", [0, 1])
def test_markov_and_confidence_heads_on_given_tokens(anchor: int) -> None:
    from deepinfer_offline.ops import deepsig as ops

    model, expected = load("dev-dspark"), cases("dev-dspark")
    draft = model.weights.draft
    assert draft is not None
    previous = torch.from_numpy(expected[f"a{anchor}_prev_tokens"])
    base = torch.from_numpy(expected[f"a{anchor}_base_logits"])
    step = ops.markov_step(base, previous, draft.markov_embed, draft.markov_head)
    assert np.abs(step.logits.numpy() - expected[f"a{anchor}_logits"]).max() <= TOLERANCE
    for state in ("prenorm", "normed"):
        hidden = torch.from_numpy(expected[f"a{anchor}_hidden_{state}"])
        found = ops.confidence(hidden, step.embedding, draft.confidence)
        assert np.abs(found.numpy() - expected[f"a{anchor}_confidence_{state}"]).max() <= TOLERANCE
