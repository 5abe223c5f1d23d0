"""Damaged and odd model files are refused in a sentence, whatever numbers and types stand in them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepinfer_offline.engine.base import EngineStartError
from deepinfer_offline.models.base import ModelOptions
from deepinfer_offline.models.llama.config import LlamaConfig
from deepinfer_offline.models.llama.model import LlamaModel
from deepinfer_offline.models.llama.weights import expected_shapes, read_layers
from deepinfer_offline.text.tokenizer import load_tokenizer
from deepinfer_offline.weights.source import resolve_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
OPTIONS = ModelOptions("cpu", torch.float32, 64, 2, 64, 32)
ODD = [None, "x", "", -1, 0, 1, 7, [], {}, [1], {"a": 1}, True, 1.5, 1e30, 1e300, float("nan"), 10**9, 10**18, 10**40]
ROPE = ("rope_type", "factor", "rope_theta", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
FIELDS = (
    *CONFIG, "num_key_value_heads", "head_dim", "attention_bias", "mlp_bias", "rope_parameters", "rope_scaling",
    "rope_theta", "dtype", "layer_types", "use_sliding_window", "quantization_config", "partial_rotary_factor",
    "original_max_position_embeddings",
)  # fmt: skip


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def number(key: bytes, value: int) -> bytes:
    return text(key) + struct.pack("<II", 4, value)


def texts(key: bytes, values: list[bytes]) -> bytes:
    return text(key) + struct.pack("<IIQ", 9, 8, len(values)) + b"".join(map(text, values))


def small_gguf() -> bytes:
    """The header of a model of one layer with a tokenizer, and room for its data (zeros), written by hand."""
    facts = [
        text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama"),
        number(b"llama.block_count", 1), number(b"llama.context_length", 64), number(b"llama.embedding_length", 8),
        number(b"llama.feed_forward_length", 8), number(b"llama.attention.head_count", 2),
        text(b"tokenizer.ggml.model") + struct.pack("<I", 8) + text(b"gpt2"),
        text(b"tokenizer.ggml.pre") + struct.pack("<I", 8) + text(b"smollm"),
        texts(b"tokenizer.ggml.tokens", [b"a", b"b", b"ab", b"<s>", *(b"t%d" % place for place in range(28))]),
        texts(b"tokenizer.ggml.merges", [b"a b"]),
        number(b"tokenizer.ggml.bos_token_id", 3), number(b"tokenizer.ggml.eos_token_id", 3),
        text(b"tokenizer.ggml.add_bos_token") + struct.pack("<I?", 7, True),
        text(b"tokenizer.chat_template") + struct.pack("<I", 8) + text(b"{{ messages }}"),
    ]  # fmt: skip
    square = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    layer = {"attn_norm": (8,), "ffn_norm": (8,)} | dict.fromkeys(square, (8, 8))
    shapes = {"token_embd.weight": (32, 8), "output_norm.weight": (8,)}
    shapes |= {f"blk.0.{name}.weight": shape for name, shape in layer.items()}
    entries, offset = [], 0
    for name, shape in shapes.items():
        entries.append(text(name.encode()) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape)))
        entries.append(struct.pack("<IQ", 0, offset))  # float32
        offset += 1024
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(shapes), len(facts)) + b"".join(facts) + b"".join(entries)
    return header + bytes(-len(header) % 32 + offset)


GGUF = small_gguf()
HEADER = len(GGUF) - 11 * 1024  # bytes before the tensors' data, and some padding


def read_all(path: Path) -> None:
    """Everything that starting an engine reads."""
    source = resolve_model(str(path))
    LlamaModel.describe(source.config, OPTIONS)
    _, layers = read_layers(source, LlamaConfig.parse(source.config), torch.float32)
    assert len(list(layers)) == source.config["num_hidden_layers"]
    load_tokenizer(path)


def refusal(call: Callable[..., Any], *given: Any) -> str | None:
    """What the user is told, None if nothing is refused. Any other error is the test's."""
    try:
        call(*given)
    except EngineStartError as error:
        return str(error)
    return None


def test_the_undamaged_file_is_read(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "m.gguf").write_bytes(GGUF)
    read_all(tmp_path / "m.gguf")
    made = load_tokenizer(tmp_path / "m.gguf")
    assert made is not None
    assert made.encode("ab") == [3, 2]


ODD_WORD = st.sampled_from([8, 9, 0, 1 << 31]).map(lambda word: word.to_bytes(4, "little"))
CHANGE = st.one_of(st.binary(min_size=1, max_size=8), st.just(b"\xff" * 8), ODD_WORD)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.integers(0, HEADER), CHANGE), min_size=1, max_size=4), end=st.integers(0, 9999))
def test_a_damaged_gguf_file_is_refused_or_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: list[tuple[int, bytes]], end: int
) -> None:
    pytest.importorskip("gguf")

    def refuse(*_: Any, **__: Any) -> None:
        raise EngineStartError("not for this test: transformers reads such a tokenizer, seconds later")

    monkeypatch.setattr("deepinfer_offline.text.load._through_transformers", refuse)
    content = bytearray(GGUF)
    for place, change in changes:
        content[place : place + len(change)] = change
    file = tmp_path / "m.gguf"
    file.write_bytes(content if end > HEADER else content[:end])
    for read in (read_all, load_tokenizer):
        assert refusal(read, file) != ""


@pytest.mark.parametrize("name", FIELDS)
def test_odd_values_of_a_configuration_are_refused_or_taken(name: str) -> None:
    said = [refusal(LlamaModel.describe, {**CONFIG, name: value}, OPTIONS) for value in ODD]
    refused = [words for words in said if words is not None]
    assert refused or name in ("model_type", "dtype")
    assert all(words.startswith("config: ") for words in refused)


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_odd_values_of_a_rope_are_refused_or_taken(kind: str) -> None:
    good = {"rope_type": kind, "factor": 2.0, "original_max_position_embeddings": 32}
    LlamaConfig.parse({**CONFIG, "rope_parameters": good})
    for name in (*ROPE, "beta_fast", "beta_slow", "attention_factor", "divisors"):
        for value in ODD:
            words = refusal(LlamaConfig.parse, {**CONFIG, "rope_parameters": {**good, name: value}})
            assert words is None or words.startswith("config: ")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("rms_norm_eps", None, "rms_norm_eps is None, must be a number of at least 0"),
        ("tie_word_embeddings", "false", "tie_word_embeddings is 'false', must be true or false"),
        ("num_key_value_heads", [2], r"num_key_value_heads is \[2\], must be a whole number"),
        ("quantization_config", ["fp8"], "quantization_config is .*must be an object"),
        ("rope_theta", 0.5, "rope_theta 0.5 must be above 1"),
    ],
)
def test_refusals_name_the_field_and_its_value(name: str, value: Any, words: str) -> None:
    with pytest.raises(EngineStartError, match=words):
        LlamaConfig.parse({**CONFIG, name: value})


def test_a_billion_layers_are_compared_with_the_tensors_there_are(tmp_path: Path) -> None:
    """A table of all their names would take a hundred GiB."""
    shapes = expected_shapes(LlamaConfig.parse(CONFIG))
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 10**9}))
    source = resolve_model(str(tmp_path))
    config = LlamaConfig.parse(source.config)
    one = (
        LlamaModel.describe(CONFIG, OPTIONS).weight_bytes
        - LlamaModel.describe({**CONFIG, "tie_word_embeddings": False}, OPTIONS).weight_bytes
    )
    assert one == 0  # tied embeddings are packed again, so they count as much as a head of its own
    assert LlamaModel.describe(source.config, OPTIONS).weight_bytes > 10**9 * 4 * 8 * 8 * 7
    with pytest.raises(EngineStartError, match=f"num_hidden_layers is 1000000000, and there are {len(shapes)} tensors"):
        read_layers(source, config, torch.float32)


@pytest.mark.parametrize(
    "index", ['{"weight_map": []}', '{"weight_map": {"x": 3}}', "{}", '{"weight_map": ' + "[" * 99999]
)
def test_an_odd_index_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors.index.json").write_text(index)
    source = resolve_model(str(tmp_path))
    with pytest.raises(EngineStartError, match=r"index\.json"):
        source.open()


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", {"eos_token": [1]}),
        ("tokenizer_config.json", {"chat_template": 5}),
        ("generation_config.json", {"eos_token_id": {"a": 1}}),
        ("config.json", {"eos_token_id": [[1]]}),
    ],
)
def test_odd_values_beside_a_tokenizer_are_refused(tmp_path: Path, file: str, content: dict[str, Any]) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path) is not None
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(EngineStartError, match=r"tokenizer of .* cannot be read"):
        load_tokenizer(tmp_path)
