"""Reading tokenizers from disk: Hugging Face folders and GGUF files, without importing transformers where possible."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from deepinfer_offline.engine.base import EngineStartError, RequestError
from deepinfer_offline.text.chat import ChatTemplate
from deepinfer_offline.text.gguf import GGUFError, read_metadata
from deepinfer_offline.text.tokenizer import Tokenizer

_SLOW_FILES = ("tokenizer.model", "vocab.json", "spiece.model", "vocab.txt")
_V41 = ("deepseek_v41", "deepsig_v41")
_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF

# How the text is split before byte-level BPE, by `tokenizer.ggml.pre`. Values: the model families' own expressions.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_SPLITS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "qwen2": (_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),),
}


def from_folder(folder: Path, name: str | None = None) -> Tokenizer | None:
    """The tokenizer of a Hugging Face folder: `tokenizer.json`, else what transformers makes of the other files."""
    settings = _read_json(folder / "tokenizer_config.json")
    file = folder / "tokenizer.json"
    if file.is_file():
        try:
            backend = Backend.from_file(str(file))
        except Exception as error:  # the Rust side raises plain Exception
            raise EngineStartError(f"{file} is not a tokenizer that this version can read: {error}") from error
    elif any((folder / slow).is_file() for slow in _SLOW_FILES):
        backend = _through_transformers(folder)
    else:
        return None
    backend.no_truncation()
    backend.no_padding()
    eos = _token_text(settings.get("eos_token"))
    bos = _token_text(settings.get("bos_token"))
    ids = _eos_ids(folder) | ({backend.token_to_id(eos)} if eos else set())
    template = _folder_template(folder, settings, bos_token=bos, eos_token=eos)
    known = {token for token in ids if isinstance(token, int)}
    made = Tokenizer(
        backend, eos_ids=known, bos_token=bos, eos_token=eos, chat_template=template, name=name or folder.name
    )
    if template is None and _read_json(folder / "config.json").get("model_type") in _V41:
        _use_v41_encoding(made)
    return made


def _use_v41_encoding(tokenizer: Tokenizer) -> None:
    """V4.1 checkpoints carry no template: their messages are encoded by a package of the model's makers."""
    from deepinfer_offline.models.deepsig_v41.chat import V41ChatEncoding

    try:
        tokenizer.chat_template = V41ChatEncoding()
    except RequestError as error:  # not installed: plain prompts still work
        tokenizer.chat_refusal = error


def from_gguf(file: Path, name: str | None = None) -> Tokenizer:
    """The tokenizer inside a GGUF file."""
    try:
        facts = read_metadata(file)
    except (OSError, GGUFError) as error:
        raise EngineStartError(f"{file} cannot be read: {error}") from error
    tokens: list[str] = facts.get("tokenizer.ggml.tokens", [])
    split = _SPLITS.get(facts.get("tokenizer.ggml.pre", "gpt-2"))
    if facts.get("tokenizer.ggml.model") == "gpt2" and split and "tokenizer.ggml.merges" in facts:
        backend = _byte_level_backend(facts, tokens, split)
    else:
        backend = _through_transformers(file.parent, gguf_file=file.name)

    def text(key: str) -> str | None:
        token_id = facts.get(f"tokenizer.ggml.{key}")
        return tokens[token_id] if isinstance(token_id, int) and 0 <= token_id < len(tokens) else None

    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ends = {facts[f"tokenizer.ggml.{key}"] for key in keys if f"tokenizer.ggml.{key}" in facts}
    bos, eos = text("bos_token_id"), text("eos_token_id")
    source = facts.get("tokenizer.chat_template")
    template = ChatTemplate(source, bos_token=bos, eos_token=eos) if source else None
    label = name or facts.get("general.name") or file.stem
    return Tokenizer(backend, eos_ids=ends, bos_token=bos, eos_token=eos, chat_template=template, name=label)


def _byte_level_backend(facts: dict[str, Any], tokens: list[str], split: tuple[str, ...]) -> Backend:
    merges = [tuple(merge.split(" ", 1)) for merge in facts["tokenizer.ggml.merges"]]
    ids = {token: place for place, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=ids, merges=merges, fuse_unk=False, ignore_merges=split[0] == _LLAMA3))
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, last])
    backend.decoder = decoders.ByteLevel()
    kinds = facts.get("tokenizer.ggml.token_type", [])
    added = {kind: [t for t, k in zip(tokens, kinds, strict=False) if k == kind] for kind in (_CONTROL, _USER_DEFINED)}
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in added[_CONTROL]])
    backend.add_tokens([AddedToken(t, normalized=False) for t in added[_USER_DEFINED]])
    if facts.get("tokenizer.ggml.add_bos_token") and "tokenizer.ggml.bos_token_id" in facts:
        from tokenizers.processors import TemplateProcessing

        first = facts["tokenizer.ggml.bos_token_id"]
        single, pair = f"{tokens[first]} $A", f"{tokens[first]} $A $B"
        backend.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=[(tokens[first], first)])
    return backend


def _through_transformers(folder: Path, **options: Any) -> Backend:
    try:
        from transformers import AutoTokenizer

        made: Any = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True, **options
        )
        return made.backend_tokenizer
    except Exception as error:
        raise EngineStartError(f"the tokenizer in {folder} cannot be loaded: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineStartError(f"{file} is not readable JSON: {error}") from error
    return found if isinstance(found, dict) else {}


def _token_text(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _eos_ids(folder: Path) -> set[int | None]:
    """End-of-sequence ids of the generation settings and the model's configuration (one id or a list)."""
    found: set[int | None] = set()
    for file in ("generation_config.json", "config.json"):
        ids = _read_json(folder / file).get("eos_token_id")
        found.update(ids if isinstance(ids, list) else [ids])
    return found


def _folder_template(folder: Path, settings: dict[str, Any], **variables: Any) -> ChatTemplate | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return ChatTemplate(file.read_text(encoding="utf-8"), **variables)
    source = settings.get("chat_template")
    if isinstance(source, list):  # several named templates
        named = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
        source = named.get("default")
    return ChatTemplate(source, **variables) if source else None
