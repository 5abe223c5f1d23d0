"""Finding and reading checkpoints: every tensor accounted for, nothing executed, mistakes named."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepinfer_offline.engine.base import EngineStartError
from deepinfer_offline.models.llama.config import LlamaConfig
from deepinfer_offline.models.llama.weights import expected_shapes, read_layers
from deepinfer_offline.weights.ledger import read_tensors
from deepinfer_offline.weights.loading import run_in_thread
from deepinfer_offline.weights.source import resolve_model
from safetensors.torch import save_file

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in expected_shapes(LlamaConfig.parse(CONFIG)).items()}


def folder(path: Path, found: dict[str, torch.Tensor], **config: Any) -> Path:
    (path / "config.json").write_text(json.dumps({**CONFIG, **config}))
    if found:
        save_file(found, path / "model.safetensors")
    return path


def load(path: Path) -> dict[str, torch.Tensor]:
    source = resolve_model(str(path))
    top, layers = read_layers(source, LlamaConfig.parse(source.config), torch.float32)
    found = dict(top)
    for layer in layers:
        found |= {f"model.layers.{layer.index}.{name}": tensor for name, tensor in layer.tensors.items()}
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_one_file(tmp_path: Path) -> None:
    assert same(load(folder(tmp_path, tensors())), tensors())


def test_shards(tmp_path: Path) -> None:
    found, where = tensors(), {}
    for place, name in enumerate(found):
        where[name] = f"part-{place % 3}.safetensors"
    for file in set(where.values()):
        save_file({name: found[name] for name in found if where[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert same(load(folder(tmp_path, {})), found)
    (tmp_path / "part-1.safetensors").unlink()
    with pytest.raises(EngineStartError, match=r"not there: part-1\.safetensors"):
        load(tmp_path)


def test_every_wrong_tensor_is_listed(tmp_path: Path) -> None:
    found = tensors()
    del found["model.norm.weight"]
    found["model.layers.1.mlp.up_proj.weight"] = torch.zeros(64, 31)
    found["model.layers.2.mlp.up_proj.weight"] = torch.zeros(64, 32)
    with pytest.raises(EngineStartError) as error:
        load(folder(tmp_path, found))
    message = str(error.value)
    assert "1 missing (model.norm.weight)" in message
    assert "1 unexpected (model.layers.2.mlp.up_proj.weight)" in message
    assert "1 misshapen (model.layers.1.mlp.up_proj.weight is [64, 31], not [64, 32])" in message


def test_buffers_and_a_second_copy_of_tied_embeddings_are_allowed(tmp_path: Path) -> None:
    found = tensors()
    extra = {"lm_head.weight": found["model.embed_tokens.weight"].clone(), "model.rotary_emb.inv_freq": torch.ones(4)}
    assert same(load(folder(tmp_path, found | extra)), found)


class Bomb:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("exploded"),))


def test_pickles_are_refused_unopened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder(tmp_path, {})
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(EngineStartError, match="pickle checkpoints only; they can run code"):
        load(tmp_path)
    assert not Path("exploded").exists()


def test_an_index_cannot_point_outside_its_folder(tmp_path: Path) -> None:
    folder(tmp_path, {})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../x.safetensors"}}))
    with pytest.raises(EngineStartError, match="outside its folder"):
        load(tmp_path)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    folder(tmp_path, {})
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0not json at all!")
    with pytest.raises(EngineStartError, match="not a readable safetensors file"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda p: str(p / "nothing"), "not a folder or a .gguf file here"),
        (lambda p: str(p), "no config.json"),
        (lambda p: (p / "config.json").write_text("{") and str(p), "not readable JSON"),
        (lambda p: (p / "config.json").write_text("[]") and str(p), "not an object"),
        (lambda p: (p / "config.json").write_text("{}") and str(p), "has no model_type"),
        (lambda p: (p / "m.bin").write_bytes(b"x") and str(p / "m.bin"), "not a .gguf file"),
        (lambda p: (p / "m.gguf").write_bytes(b"GGUFxxxx") and str(p / "m.gguf"), "not a GGUF file"),
        (
            lambda p: (p / "config.json").write_text('{"model_type": "custom", "auto_map": {}}') and str(p),
            "code from a checkpoint is never run",
        ),
    ],
)
def test_what_is_not_a_model_says_so(tmp_path: Path, prepare: Any, words: str) -> None:
    with pytest.raises(EngineStartError, match=words.replace(".", r"\.")):
        resolve_model(prepare(tmp_path))


def test_an_unknown_family_lists_the_known_ones() -> None:
    from deepinfer_offline.models import known_model_types, model_class

    with pytest.raises(EngineStartError, match=r"'mamba'; it runs .*llama.*qwen2.*qwen3"):
        model_class("mamba")
    assert "llama" in known_model_types()


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """The channel order in which GGUF's llama architecture stores query and key heads."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path: Path, found: dict[str, torch.Tensor], quantised: bool) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_token_list(["a", "bc", "é"])  # arrays of strings are skipped over
    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    parts = {
        "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    for name, tensor in found.items():
        values = tensor.numpy()
        if name not in names:
            _, _, layer, rest = name.split(".", 3)
            names[name] = f"blk.{layer}.{parts[rest.removesuffix('.weight')]}.weight"
            if "q_proj" in name or "k_proj" in name:
                values = interleaved(values, 4 if "q_proj" in name else 2)
        kind = gguf.GGMLQuantizationType.Q8_0
        if quantised and values.ndim == 2:
            writer.add_tensor(names[name], gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(names[name], values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("quantised", [False, True])
def test_gguf_gives_the_same_tensors(tmp_path: Path, quantised: bool) -> None:
    found = tensors()
    write_gguf(tmp_path / "tiny.gguf", found, quantised)
    source = resolve_model(str(tmp_path / "tiny.gguf"))
    assert source.name == "tiny"
    ours, theirs = LlamaConfig.parse(source.config), LlamaConfig.parse(CONFIG)
    differing = {name for name in LlamaConfig.__slots__ if getattr(ours, name) != getattr(theirs, name)}
    # a GGUF file says neither the activation dtype nor float64 digits of the norm's epsilon
    assert differing <= {"dtype", "rms_norm_eps"}
    assert ours.rms_norm_eps == pytest.approx(1e-5)
    loaded = load(tmp_path / "tiny.gguf")
    assert loaded.keys() == found.keys()
    for name, tensor in found.items():
        # Q8_0 rounds to 1/254 of each block's largest value (randn: below 5)
        assert (loaded[name] - tensor).abs().max() <= (5 / 254 + 1e-3 if quantised else 0), name


def test_other_gguf_architectures_are_refused(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(EngineStartError, match="architecture 'mamba'; the native engine reads llama, qwen2, qwen3"):
        resolve_model(str(tmp_path / "m.gguf"))


def test_tensors_come_in_the_order_asked_and_errors_come_through() -> None:
    class Reader:
        @property
        def shapes(self) -> dict[str, tuple[int, ...]]:
            return {}

        def read(self, name: str) -> torch.Tensor:
            if name == "bad":
                raise EngineStartError("bad")
            return torch.tensor([float(name)])

        def close(self) -> None: ...

    names = [str(i) for i in range(40)]
    assert [int(tensor) for _, tensor in read_tensors(Reader(), names, torch.float32)] == list(range(40))
    with pytest.raises(EngineStartError, match="bad"):
        list(read_tensors(Reader(), ["1", "bad"], torch.float32))


def test_loading_in_a_thread_returns_and_raises() -> None:
    assert run_in_thread(lambda: 3) == 3
    with pytest.raises(EngineStartError, match="no"):
        run_in_thread(lambda: (_ for _ in ()).throw(EngineStartError("no")))


def test_code_that_a_built_in_model_brings_is_named_in_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
        config: dict[str, Any] = {"model_type": "llama"}
        if name == "with":
            config["auto_map"] = {"AutoModelForCausalLM": "modeling.Model"}
            (tmp_path / name / "tokenizer_config.json").write_text('{"auto_map": {}}')
            (tmp_path / name / "modeling.py").write_text("raise AssertionError('run')")
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        for _ in range(2):
            assert resolve_model(str(tmp_path / name)).model_type == "llama"
    assert len(caplog.messages) == 1
    assert "auto_map in config.json and tokenizer_config.json" in caplog.messages[0]
    assert "never run" in caplog.messages[0]
