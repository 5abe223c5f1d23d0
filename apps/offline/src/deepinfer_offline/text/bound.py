"""How much text one token can stand for: what tells that a text is too long without tokenizing it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepinfer_offline.text.vocabulary import byte_characters

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_NFC = 4  # times that NFC makes a text shorter, at most 3.5: U+1FBE U+0308 U+0301 (7 bytes) becomes U+0390 (2 bytes)
_NEVER = {0xC0, 0xC1, *range(0xF5, 0x100)}  # bytes that UTF-8 does not have
_KEEPING = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "Split", "Punctuation")


@dataclass(frozen=True, slots=True)
class TokenBound:
    """What is sure of the size of a tokenizer's tokens.

    Attributes:
        longest: most bytes of a text that one id can stand for.
        dropped: bytes that the vocabulary lacks and the tokenizer leaves out, so that they cost no id.
    """

    longest: int
    dropped: bytes = b""

    def fewest_tokens(self, text: str) -> int:
        """A number of ids that the text has at least."""
        return -(-len(text.encode(errors="replace").translate(None, self.dropped)) // self.longest)


def token_bound(backend: Backend) -> TokenBound | None:
    """Look for a bound in a tokenizer's parts.

    Only byte-level BPE and BPE with byte fallback have one: other tokenizers drop what they do not know or make one id
    of it, whatever its length. Where a normalizer, a pre-tokenizer or an added token may drop text, there is none.

    Returns:
        None where nothing is sure.
    """
    normal, splits = _steps(backend.normalizer), _steps(backend.pre_tokenizer)
    added = backend.get_added_tokens_decoder().values()
    shorter = _shortening(normal)
    strips = any(token.lstrip or token.rstrip for token in added)
    if not shorter or strips or not all(map(_keeps_all, splits)) or type(backend.model).__name__ != "BPE":
        return None
    tokens = backend.get_vocab(with_added_tokens=True)
    if any(step["type"] == "ByteLevel" for step in [*normal, *splits]):
        missing = {byte for letter, byte in byte_characters().items() if letter not in tokens} - _NEVER
        size = max(map(len, tokens))  # a character stands for a byte
        if missing and (normal or any(step["type"] == "Metaspace" for step in splits)):
            return None  # a byte that is there may become one that is dropped
    else:
        missing, size = set(), max(len(token.encode()) for token in tokens)
        if not backend.model.byte_fallback or any(f"<0x{byte:02X}>" not in tokens for byte in range(256)):
            return None
    return TokenBound(shorter * max([size, *(len(token.content.encode()) for token in added)]), bytes(sorted(missing)))


def _steps(part: Any) -> list[dict[str, Any]]:
    """The steps of a normalizer or a pre-tokenizer, as `tokenizer.json` has them."""
    if part is None:
        return []
    try:
        state = json.loads(part.__getstate__())
    except Exception:  # a step written in Python cannot be looked into
        return [{"type": "unknown"}]
    found: list[dict[str, Any]] = []
    for step in state.get("normalizers", state.get("pretokenizers", [state])):
        found += step.get("normalizers", step.get("pretokenizers", [step]))
    return found


def _shortening(steps: list[dict[str, Any]]) -> int:
    """How many times shorter a text may come out of a normalizer; 0 if there is no saying."""
    times = 1
    for step in steps:
        if step["type"] == "NFC":
            times *= _NFC
        elif step["type"] == "Replace":
            before, after = step["pattern"].get("String"), step["content"]
            if not before or not after:
                return 0
            times *= -(-len(before.encode()) // len(after.encode()))
        elif step["type"] not in ("Prepend", "ByteLevel"):
            return 0
    return times


def _keeps_all(step: dict[str, Any]) -> bool:
    return step["type"] in _KEEPING and step.get("behavior") != "Removed"
