"""The vocabulary that a grammar is compiled for: the bytes of every token, and which ids are special."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cached_property


class Vocabulary:
    """Token bytes and special ids of a tokenizer. Two vocabularies with equal `key` are interchangeable.

    Args:
        tokens: bytes of every id, in order. A special token's bytes are its name, e.g. `b"<|im_end|>"`.
        eos_ids: ids that end a sequence, at least one. They are offered when the grammar may end.
        special_ids: ids that never stand for text; `eos_ids` are added.
        size: width of the logits when the model pads its vocabulary; None for `len(tokens)`.
        encode: text to ids; used to choose the tokens of forced text. None chooses the longest tokens greedily.

    Raises:
        ValueError: no end-of-sequence id, an id out of range, or `size` below the number of tokens.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        *,
        eos_ids: Sequence[int],
        special_ids: Sequence[int] = (),
        size: int | None = None,
        encode: Callable[[str], list[int]] | None = None,
    ) -> None:
        self.tokens = list(tokens)
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.special_ids = tuple(sorted({*special_ids, *eos_ids}))
        self.size = len(self.tokens) if size is None else size
        self.encode = encode
        if not self.eos_ids:
            raise ValueError("a vocabulary needs at least one end-of-sequence id")
        bad = [i for i in self.special_ids if not 0 <= i < len(self.tokens)]
        if bad:
            raise ValueError(f"special ids out of range 0..{len(self.tokens) - 1}: {bad[:5]}")
        if self.size < len(self.tokens):
            raise ValueError(f"size {self.size} is smaller than the {len(self.tokens)} tokens given")

    @classmethod
    def bytewise(cls) -> Vocabulary:
        """256 single-byte tokens and one end-of-sequence token (id 256): for tests and text-level checks."""
        return cls([bytes([i]) for i in range(256)] + [b"<eos>"], eos_ids=[256])

    @cached_property
    def key(self) -> str:
        """A digest of the token bytes, special ids and size."""
        digest = hashlib.blake2b(digest_size=16)
        for token in self.tokens:
            digest.update(len(token).to_bytes(4, "little") + token)
        digest.update(repr((self.eos_ids, self.special_ids, self.size)).encode())
        return digest.hexdigest()

    @cached_property
    def padded_tokens(self) -> list[bytes]:
        """Token bytes extended with empty entries up to `size`."""
        return self.tokens + [b""] * (self.size - len(self.tokens))

    def __len__(self) -> int:
        return self.size

    def __repr__(self) -> str:
        return f"Vocabulary({len(self.tokens)} tokens, size {self.size}, eos {list(self.eos_ids)})"
