"""One kind of cached state: how large its blocks are, and how long their content stays useful."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from deepinfer_cache.errors import CacheConfigError

Kind = Literal["prefix", "window", "state"]
KINDS: tuple[Kind, ...] = ("prefix", "window", "state")


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """State that shares one block table.

    Attributes:
        name: unique within a model, e.g. `"kv"`, `"global"`, `"swa"`.
        kind: `prefix` keeps every position and can be shared between sequences; `window` keeps the last `window`
            positions of a running sequence; `state` is one fixed-size record a sequence, which the rows computed after
            a hit must be able to rebuild (V4.1's open pairs are; a recurrent state is not: then set
            `CacheConfig.enable_prefix_cache=False`).
        block_size: tokens that one block covers. `state` groups have one block a sequence, whatever this says.
        tokens_per_entry: positions that one stored entry stands for (the compress ratio r of V4.1's global KV).
        entry_bytes: bytes of one entry over all layers of the group; only memory sizing reads it.
        window: positions that a query may read, itself included; only for `window`.
        hit_multiple: for state that is empty at the multiples of this many tokens and is filled by the rows between
            two of them (V4.1's open groups of r tokens). A hit may end elsewhere only if the rows from the multiple
            before it on are computed again; otherwise it is cut to a multiple.
    """

    name: str
    kind: Kind
    block_size: int = 16
    tokens_per_entry: int = 1
    entry_bytes: int = 0
    window: int = 0
    hit_multiple: int = 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise CacheConfigError(f"group {self.name!r}: kind {self.kind!r} is not one of {', '.join(KINDS)}")
        if self.block_size < 1:
            raise CacheConfigError(f"group {self.name!r}: block_size {self.block_size} must be at least 1")
        if self.hit_multiple < 1:
            raise CacheConfigError(f"group {self.name!r}: hit_multiple {self.hit_multiple} must be at least 1")
        if self.tokens_per_entry < 1 or self.block_size % self.tokens_per_entry:
            raise CacheConfigError(
                f"group {self.name!r}: tokens_per_entry {self.tokens_per_entry} must divide block_size {self.block_size}"
            )
        if (self.kind == "window") != (self.window > 0):
            raise CacheConfigError(
                f"group {self.name!r}: window {self.window} and kind {self.kind!r} do not fit together"
            )

    @property
    def entries_per_block(self) -> int:
        return self.block_size // self.tokens_per_entry

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of the group."""
        return self.entry_bytes * (1 if self.kind == "state" else self.entries_per_block)
