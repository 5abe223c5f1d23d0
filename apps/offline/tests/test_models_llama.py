"""Llama-family models against transformers in float32, in any chunking, company, sharing and cascade."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepinfer_offline.engine.base import EngineStartError
from deepinfer_offline.models.base import BatchCascade, ForwardBatch, HostBatch, ModelOptions
from deepinfer_offline.models.llama.config import LlamaConfig
from deepinfer_offline.models.llama.model import LlamaModel
from deepinfer_offline.ops.attention.base import GROUP
from deepinfer_offline.weights.source import resolve_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

transformers = pytest.importorskip("transformers")

# Both sides compute in float32 (2^-24 relative rounding) and differ in the order of sums only. Logits here are O(1), and
# three layers of sums over at most 96 terms stay well below 2e-5; a wrong scale, mask or rotation moves them by 1e-2.
TOLERANCE = 2e-5
BLOCK, BLOCKS = 8, 64

BASE: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm2": ("Llama", {}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": False}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LINEAR}),
    "qwen2": ("Qwen2", {"rope_parameters": YARN}),
    "qwen3": ("Qwen3", {"head_dim": 16, "num_key_value_heads": 3, "tie_word_embeddings": False}),
}


def make_checkpoint(family: str, folder: Path, shard: str = "5GB") -> Any:
    """A random model of transformers, saved to `folder`."""
    torch.manual_seed(7)
    name, changes = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**BASE, **changes})
    theirs = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():  # fresh norms are all one and fresh biases zero: they would hide mistakes
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.ndim == 1 else 0.05))
    theirs.save_pretrained(folder, max_shard_size=shard)
    return theirs


def options(**changes: Any) -> ModelOptions:
    values = {
        "device": "cpu",
        "dtype": torch.float32,
        "max_model_len": 200,
        "max_running": 8,
        "max_step_tokens": 256,
        "block_size": BLOCK,
    }
    return ModelOptions(**{**values, **changes})


class Harness:
    """Runs rows of sequences through a model; sequence i owns the blocks of `tables[i]`."""

    def __init__(self, model: LlamaModel, sequences: Sequence[Sequence[int]]) -> None:
        self.model, self.sequences = model, [list(sequence) for sequence in sequences]
        self.cache = model.allocate_cache({GROUP: BLOCKS * len(sequences) + 1})
        rng = np.random.default_rng(3)
        blocks = 1 + rng.permutation(BLOCKS * len(sequences)).astype(np.int32)  # scattered, as after a long run
        self.tables = blocks.reshape(len(sequences), BLOCKS)
        self.floors = np.zeros(len(sequences), np.int32)

    def share(self, sequence: int, other: int, tokens: int) -> None:
        """Let `sequence` read its first `tokens` positions from `other`'s blocks, and not write them."""
        self.tables[sequence, : tokens // BLOCK] = self.tables[other, : tokens // BLOCK]
        self.floors[sequence] = tokens

    def run(
        self,
        rows: Sequence[tuple[int, int, int]],
        cascades: tuple[BatchCascade, ...] = (),
        wanted: np.ndarray | None = None,
    ) -> list[torch.Tensor]:
        """Compute (sequence, start, count) rows in one forward; logits [count, vocab] of each, by sequence.

        With `wanted` (flattened token rows) one entry with the logits of those.
        """
        rows = sorted(rows, key=lambda row: row[2] != 1)
        which = np.array([row[0] for row in rows], np.int32)
        counts = np.array([row[2] for row in rows], np.int32)
        query_starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        ids = [token for i, start, count in rows for token in self.sequences[i][start : start + count]]
        positions = np.concatenate([np.arange(start, start + count) for _, start, count in rows])
        host = HostBatch(
            query_starts=query_starts,
            seq_lens=np.array([start + count for _, start, count in rows], np.int32),
            slots=which,
            prefills=counts > 1,
            floors=np.zeros(len(rows), np.int32),
            write_floors=self.floors[which],
            keep_all=np.ones(len(rows), bool),
            logit_rows=np.arange(len(ids)) if wanted is None else wanted,
            block_tables={GROUP: self.tables[which]},
            num_decodes=int((counts == 1).sum()),
        )
        put = torch.from_numpy
        batch = ForwardBatch(
            token_ids=torch.tensor(ids),
            positions=put(positions),
            query_starts=put(query_starts),
            seq_lens=put(host.seq_lens),
            slots=put(which),
            floors=put(host.floors),
            write_floors=put(host.write_floors),
            logit_rows=put(host.logit_rows),
            block_tables={GROUP: put(host.block_tables[GROUP])},
            cascades=cascades,
            tokens=torch.zeros(1, 1, dtype=torch.int32),
            host=host,
        )
        with torch.inference_mode():
            logits = self.model.logits(self.model.forward(batch, self.cache))
        if wanted is not None:
            return [logits]
        parts = dict(zip(which.tolist(), logits.split(counts.tolist()), strict=True))
        return [parts[i] for i in sorted(parts)]


def ids(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, BASE["vocab_size"], count).tolist()


def their_logits(theirs: Any, sequence: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        return theirs(torch.tensor([list(sequence)])).logits[0].float()


@pytest.fixture(scope="module", params=list(FAMILIES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LlamaModel, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    theirs = make_checkpoint(request.param, folder, shard="60KB" if request.param == "qwen2" else "5GB")
    if request.param == "qwen2":
        assert len(list(folder.glob("*.safetensors"))) > 1, "the checkpoint was to be sharded"
    return LlamaModel.load(resolve_model(str(folder)), options()), theirs


def test_logits_equal_transformers(pair: tuple[LlamaModel, Any]) -> None:
    model, theirs = pair
    sequence = ids(150, 1)  # past the trained length of the scaled families
    found = Harness(model, [sequence]).run([(0, 0, 150)])[0]
    torch.testing.assert_close(found, their_logits(theirs, sequence), atol=TOLERANCE, rtol=TOLERANCE)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=5), min_size=2, max_size=4))
def test_chunks_and_company_do_not_matter(pair: tuple[LlamaModel, Any], cuts: list[list[int]]) -> None:
    model, theirs = pair
    sequences = [ids(sum(chunks), seed) for seed, chunks in enumerate(cuts)]
    harness = Harness(model, sequences)
    found: list[list[torch.Tensor]] = [[] for _ in sequences]
    for step in range(max(map(len, cuts))):
        rows = [(i, sum(chunks[:step]), chunks[step]) for i, chunks in enumerate(cuts) if step < len(chunks)]
        for (i, _, _), part in zip(rows, harness.run(rows), strict=True):  # both in the order of the sequences
            found[i].append(part)
    for sequence, parts in zip(sequences, found, strict=True):
        torch.testing.assert_close(torch.cat(parts), their_logits(theirs, sequence), atol=TOLERANCE, rtol=TOLERANCE)


def test_a_shared_prefix_is_read_in_the_step_that_writes_it(pair: tuple[LlamaModel, Any]) -> None:
    model, theirs = pair
    prefix = ids(32, 5)
    sequences = [prefix + ids(9, 6), prefix + ids(4, 7)]
    harness = Harness(model, sequences)
    harness.share(1, 0, 32)
    found = harness.run([(0, 0, 41), (1, 32, 4)])
    torch.testing.assert_close(found[1], their_logits(theirs, sequences[1])[32:], atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(found[0], their_logits(theirs, sequences[0]), atol=TOLERANCE, rtol=TOLERANCE)


def test_positions_below_the_write_floor_stay_untouched(pair: tuple[LlamaModel, Any]) -> None:
    model, theirs = pair
    sequences = [ids(24, 8), ids(24, 9)]
    harness = Harness(model, sequences)
    harness.run([(0, 0, 24)])
    harness.share(1, 0, 16)
    harness.run([(1, 0, 24)])  # computes other tokens over blocks it shares: must not write them
    found = harness.run([(0, 23, 1)])
    torch.testing.assert_close(found[0], their_logits(theirs, sequences[0])[23:], atol=TOLERANCE, rtol=TOLERANCE)


def test_cascades_change_nothing(pair: tuple[LlamaModel, Any]) -> None:
    model, theirs = pair
    prefixes = [ids(40, 20), ids(16, 21)]
    owners = [0, 0, 1, 0, 1]
    sequences = [prefixes[o] + ids(5 + i, 30 + i) for i, o in enumerate(owners)] + [ids(12, 40)]
    harness = Harness(model, sequences)
    first = [owners.index(o) for o in owners]
    for i, o in enumerate(owners):
        if first[i] != i:
            harness.share(i, first[i], len(prefixes[o]))
    last = [len(sequence) - 1 for sequence in sequences]
    harness.run([(i, 0, last[i]) for i in range(len(sequences))])
    rows = [(i, last[i], 1) for i in range(len(sequences))]
    plain = harness.run(rows)
    groups = (BatchCascade(np.array([0, 1, 3], np.int32), 40), BatchCascade(np.array([2, 4], np.int32), 16))
    shared = harness.run(rows, groups)
    for i, sequence in enumerate(sequences):
        expected = their_logits(theirs, sequence)[-1:]
        torch.testing.assert_close(shared[i], expected, atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(shared[i], plain[i], atol=TOLERANCE, rtol=TOLERANCE)


def test_only_wanted_rows_leave_the_last_layer(pair: tuple[LlamaModel, Any]) -> None:
    model, theirs = pair
    sequence, rows = ids(12, 50), np.array([3, 11])
    found = Harness(model, [sequence]).run([(0, 0, 12)], wanted=rows)[0]
    torch.testing.assert_close(found, their_logits(theirs, sequence)[rows], atol=TOLERANCE, rtol=TOLERANCE)


def test_bfloat16_stays_close_to_float32(tmp_path: Path) -> None:
    theirs = make_checkpoint("smollm2", tmp_path)
    model = LlamaModel.load(resolve_model(str(tmp_path)), options(dtype=torch.bfloat16))
    sequence = ids(60, 2)
    found = Harness(model, [sequence]).run([(0, 0, 60)])[0]
    expected = their_logits(theirs, sequence)
    # bfloat16 keeps 8 bits: 2^-9 relative a rounding, a few dozen of them along three layers
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_key_value_heads": 4}, "num_key_value_heads 4 does not divide num_attention_heads 6"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope' is not one of default, linear, llama3, yarn"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq'"),
    ],
)
def test_what_it_cannot_run_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(EngineStartError, match=words.replace("(", r"\(")):
        LlamaConfig.parse({**BASE, "model_type": "llama", **change})


def test_described_weights_are_what_the_checkpoint_holds(tmp_path: Path) -> None:
    theirs = make_checkpoint("qwen3", tmp_path)
    facts = LlamaModel.describe(resolve_model(str(tmp_path)).config, options())
    assert facts.weight_bytes == 4 * sum(p.numel() for p in theirs.parameters())
    group = facts.cache_groups[0]
    assert group.bytes_per_block == 3 * 2 * 3 * 16 * BLOCK * 4  # layers, keys and values, heads, channels, positions
