"""vLLM's requests and tokenizers as this package's values. Pure functions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache
from typing import Any

from deepinfer_structured import Spec, Vocabulary

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_FIELDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


def spec_of_params(params: Any) -> Spec | None:
    """Translate a `vllm.sampling_params.StructuredOutputsParams`. Raises InvalidSpec."""
    return Spec.from_structured_outputs({name: getattr(params, name, None) for name in _FIELDS})


def spec_of_key(kind: str, content: str) -> Spec:
    """Translate what vLLM's engine core knows of a request: the option's name (`JSON`, `REGEX`, ...) and its text."""
    makers = {
        "JSON": Spec.json_schema,
        "JSON_OBJECT": lambda _: Spec.json_object(),
        "REGEX": Spec.regex,
        "CHOICE": lambda text: Spec.choice(json.loads(text)),
        "GRAMMAR": Spec.grammar,
        "STRUCTURAL_TAG": Spec.structural_tag,
    }
    return makers[kind](content)


@cache
def byte_alphabet() -> dict[str, int]:
    """The printable characters by which byte-level BPE vocabularies write the 256 bytes (GPT-2's scheme)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(rest)}


def token_bytes(piece: str, *, byte_level: bool) -> bytes:
    """Return the bytes of a vocabulary entry, of a byte-level BPE or of a SentencePiece vocabulary."""
    if byte_level:
        alphabet = byte_alphabet()
        if all(c in alphabet for c in piece):
            return bytes(alphabet[c] for c in piece)
        return piece.encode()
    match = _BYTE_TOKEN.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match else piece.replace("▁", " ").encode()


def vocabulary(tokenizer: Any, size: int, stop_ids: Iterable[int] | None = None) -> Vocabulary:
    """Build the vocabulary of a Hugging Face fast tokenizer.

    Args:
        tokenizer: has `get_vocab`, `all_special_ids`, `eos_token_id` and `backend_tokenizer`.
        size: width of the model's logits.
        stop_ids: ids that may end a request; its end-of-sequence id is added.
    """
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    byte_level = "ByteLevel" in json.dumps([state.get("pre_tokenizer"), state.get("decoder")])
    added = {token["id"] for token in state.get("added_tokens", ())}
    entries = tokenizer.get_vocab()
    pieces = [b""] * (max(entries.values()) + 1)
    for piece, id_ in entries.items():
        pieces[id_] = piece.encode() if id_ in added else token_bytes(piece, byte_level=byte_level)
    ends = {*(stop_ids or ()), *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])}
    return Vocabulary(
        pieces,
        eos_ids=sorted(i for i in ends if i < len(pieces)),
        special_ids=[i for i in tokenizer.all_special_ids if i < len(pieces)],
        size=max(size, len(pieces)),
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
    )
