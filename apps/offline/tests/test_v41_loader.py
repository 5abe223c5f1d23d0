"""Checkpoints: every tensor accounted for by name, and the writer's layout read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from deepinfer_offline.engine.base import EngineStartError
from deepinfer_offline.models.base import ModelOptions
from deepinfer_offline.models.deepsig_v41.config import V41Config
from deepinfer_offline.models.deepsig_v41.layout import checkpoint_specs
from deepinfer_offline.models.deepsig_v41.loader import LayoutError
from deepinfer_offline.models.deepsig_v41.model import DeepSigV41Model
from deepinfer_offline.models.deepsig_v41.schedule import plan_layers
from deepinfer_offline.models.deepsig_v41.session import whole_sequence_logits
from deepinfer_offline.models.deepsig_v41.synthetic import random_tensors
from deepinfer_offline.models.deepsig_v41.weights import weight_bytes
from deepinfer_offline.models.deepsig_v41.writer import QUANTIZATION_CONFIG, write_checkpoint
from deepinfer_offline.ops.deepsig.formats import quantize_fp4_rows, quantize_fp8_rows, quantize_fp8_tiles
from deepinfer_offline.weights.source import resolve_model
from safetensors.torch import load_file, save_file

ORACLE = Path(__file__).parent / "data" / "v41-oracle"
OPTIONS = ModelOptions("cpu", torch.float32, 128, 4, 128, 16)

TINY: dict[str, Any] = {
    "model_type": "deepsig_v41",
    "text_config": {
        "vocab_size": 96,
        "hidden_size": 48,
        "moe_intermediate_size": 40,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "head_dim": 32,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 40,
        "o_groups": 2,
        "o_lora_rank": 24,
        "sliding_window": 6,
        "compress_ratios": [0, 2, 1, 1, 0],
        "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2, 3],
        "candidate_source_layer_id": 2,
        "candidate_topk_blocks": 3,
        "candidate_block_size": 4,
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 6,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "engram_layer_ids": [],
        "num_nextn_predict_layers": 1,
        "dspark_block_size": 3,
        "dspark_noise_token_id": 90,
        "dspark_target_layer_ids": [2, 3],
        "dspark_markov_rank": 8,
        "dspark_n_routed_experts": 3,
        "dspark_num_experts_per_tok": 2,
        "rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64},
        "max_position_embeddings": 512,
    },
}


def copy_of(name: str, folder: Path, change: Any) -> Path:
    """A checkpoint whose tensors `change` has edited in place."""
    tensors = load_file(ORACLE / name / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((ORACLE / name / "config.json").read_text())
    return folder


def load(folder: Path) -> DeepSigV41Model:
    return DeepSigV41Model.load(resolve_model(str(folder)), OPTIONS)


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["layers.2.attn.indexer.wk.weight"], tensors["norm.weight"]

    with pytest.raises(LayoutError, match=r"2 missing: norm\.weight; layers\.2\.attn\.indexer\.wk\.weight"):
        load(copy_of("dev-backbone", tmp_path, drop))


def test_unexpected_tensors_are_named(tmp_path: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["layers.0.attn.indexer.wk.weight"] = torch.zeros(2)

    with pytest.raises(LayoutError, match=r"1 unexpected: layers\.0\.attn\.indexer\.wk\.weight"):
        load(copy_of("dev-backbone", tmp_path, add))


def test_misshapen_tensors_are_named_with_both_shapes(tmp_path: Path) -> None:
    def cut(tensors: dict[str, torch.Tensor]) -> None:
        tensors["layers.1.attn.wkv.weight"] = tensors["layers.1.attn.wkv.weight"][:-1].contiguous()

    with pytest.raises(LayoutError, match=r"layers\.1\.attn\.wkv\.weight is F32 \[31, 64\], expected \[32, 64\]"):
        load(copy_of("dev-backbone", tmp_path, cut))


def test_quantised_weight_without_scale(tmp_path: Path) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["layers.0.attn.wq_a.scale"]

    with pytest.raises(LayoutError, match=r"1 missing: layers\.0\.attn\.wq_a\.scale"):
        load(copy_of("dev-quant", tmp_path, drop))


def test_scale_of_another_block_size(tmp_path: Path) -> None:
    def halve(tensors: dict[str, torch.Tensor]) -> None:
        raw = tensors["layers.0.ffn.experts.1.w1.scale"].view(torch.uint8)
        tensors["layers.0.ffn.experts.1.w1.scale"] = raw[:, ::2].contiguous().view(torch.float8_e8m0fnu)

    with pytest.raises(LayoutError, match=r"experts\.1\.w1\.scale is F8_E8M0 \[64, 2\], expected F8_E8M0 \[64, 4\]"):
        load(copy_of("dev-quant", tmp_path, halve))


def test_norm_may_not_be_quantised(tmp_path: Path) -> None:
    def turn(tensors: dict[str, torch.Tensor]) -> None:
        tensors["norm.weight"] = tensors["norm.weight"].to(torch.float8_e4m3fn)

    with pytest.raises(LayoutError, match=r"norm\.weight is stored as F8_E4M3, which a plain tensor may not be"):
        load(copy_of("dev-quant", tmp_path, turn))


def test_vision_tensors_are_accounted_for_and_not_read(tmp_path: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["vision.blocks.0.norm.weight"] = torch.zeros(2)
        tensors["aligner.proj.weight"] = torch.zeros(2)
        tensors["image_start"] = torch.zeros(64)
        for name in [n for n in tensors if n.endswith("bias_vl")]:
            del tensors[name]

    folder = copy_of("dev-backbone", tmp_path, add)
    ids = list(range(20))
    assert torch.equal(
        whole_sequence_logits(load(folder), ids), whole_sequence_logits(load(ORACLE / "dev-backbone"), ids)
    )


def test_engram_needs_the_models_own_tokenizer(tmp_path: Path) -> None:
    folder = copy_of("dev-engram", tmp_path, lambda _: None)
    with pytest.raises(EngineStartError, match=r"has no tokenizer\.json, which Engram layers \[1, 2\] hash tokens by"):
        load(folder)
    tokenizer = json.loads((ORACLE / "dev-engram" / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = [word for word, i in vocabulary.items() if i in (100, 101)]
    del vocabulary[first], vocabulary[second]
    vocabulary["zzz-one"], vocabulary["zzz-two"] = 100, 101
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(EngineStartError, match="distinct normalised tokens, but engram_compressed_vocab_size is 89"):
        load(folder)


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("shard_bytes", [1 << 30, 60_000])
def test_written_checkpoint_is_read_back(tmp_path: Path, quantised: bool, shard_bytes: int) -> None:
    raw = dict(TINY, **({"quantization_config": QUANTIZATION_CONFIG} if quantised else {}))
    config = V41Config.parse(raw)
    tensors = dict(random_tensors(config, seed=5))
    paths = write_checkpoint(tmp_path, raw, iter(tensors.items()), dtype=torch.float32, shard_bytes=shard_bytes)
    assert (len(paths) == 1) == (shard_bytes == 1 << 30)
    stored = {name: tensor for path in paths for name, tensor in load_file(path).items()}
    model = load(tmp_path)
    assert weight_bytes(model.weights) == model.facts.weight_bytes
    layer, logical = model.weights.layers[1], tensors["layers.1.attn.wq_b.weight"]
    if not quantised:
        assert torch.equal(layer.attention.wq_b, logical)
        return
    assert stored["layers.1.attn.wq_b.weight"].dtype == torch.float8_e4m3fn
    assert stored["layers.1.ffn.experts.0.w1.weight"].dtype == torch.int8
    assert stored["mtp.0.main_proj.weight"].dtype == torch.float8_e4m3fn
    # Half a step of E4M3 is 2^-4 of a value; the smallest steps are far below 2^-8 of the tile's maximum.
    assert ((layer.attention.wq_b - logical).abs() <= logical.abs() / 16 + logical.abs().max() / 256).all()


def test_writer_stores_what_the_quantisers_make() -> None:
    from deepinfer_offline.models.deepsig_v41.writer import stored_form

    config = V41Config.parse(dict(TINY, quantization_config=QUANTIZATION_CONFIG))
    specs = checkpoint_specs(config, plan_layers(config))
    for name, quantise in (
        ("layers.0.attn.wo_b.weight", quantize_fp8_tiles),
        ("layers.0.ffn.experts.2.w2.weight", quantize_fp4_rows),
    ):
        value = torch.randn(specs[name].shape)
        form = stored_form(specs[name], value, quantise=True, dtype=torch.float32)
        codes, scales = quantise(value)
        assert torch.equal(form[name].view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(form[specs[name].scale_name].view(torch.uint8), scales.view(torch.uint8))


def test_engram_table_scales_are_by_row() -> None:
    codes, scales = quantize_fp8_rows(torch.randn(5, 64) * torch.tensor([[1.0], [100], [0.01], [1], [1]]))
    assert scales.shape == (5, 2)
    assert codes.shape == (5, 64)
    assert scales.float()[1, 0] > scales.float()[0, 0] > scales.float()[2, 0]


def test_writer_refuses_unknown_missing_and_repeated_tensors(tmp_path: Path) -> None:
    tensors = list(random_tensors(V41Config.parse(TINY)))
    with pytest.raises(ValueError, match=r"1 tensors are missing, e\.g\. norm\.weight"):
        write_checkpoint(tmp_path, TINY, (item for item in tensors if item[0] != "norm.weight"))
    with pytest.raises(ValueError, match=r"layers\.9\.x is not a tensor of this configuration"):
        write_checkpoint(tmp_path, TINY, iter([("layers.9.x", torch.zeros(1))]))
    with pytest.raises(ValueError, match=r"norm\.weight is given twice"):
        write_checkpoint(tmp_path, TINY, iter([("norm.weight", torch.zeros(48)), ("norm.weight", torch.zeros(48))]))
    with pytest.raises(ValueError, match=r"norm\.weight has shape \[47\], the layout says \[48\]"):
        write_checkpoint(tmp_path, TINY, iter([("norm.weight", torch.zeros(47))]))


@pytest.mark.parametrize("name", ["dev-backbone", "dev-engram", "dev-quant", "dev-dspark", "dev-replay"])
def test_stated_weight_bytes_are_the_loaded_bytes(name: str) -> None:
    model = load(ORACLE / name)
    assert weight_bytes(model.weights) == model.facts.weight_bytes
