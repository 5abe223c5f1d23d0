"""How much of each group there is, and how it is looked up and evicted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from deepinfer_cache.errors import CacheConfigError
from deepinfer_cache.group import CacheGroup
from deepinfer_cache.strategy import make_strategy

Eviction = Literal["lru", "next-use"]


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Sizes and policies of a `CacheManager`.

    Every prefix group is cut into pages of `page_size` tokens: the least common multiple of their block sizes, usually
    one block. A page is allocated, shared and evicted in all prefix groups at once, because a hit is only worth
    something if all of them have it; page `p` of a group with k blocks a page owns blocks `p*k .. p*k+k-1`.

    Attributes:
        groups: what the model declares; at least one.
        num_pages: usable pages of the prefix groups. Page 0 exists besides them and is never used: empty table
            entries point to it.
        max_running: slots, i.e. rows of each block table.
        max_model_len: tokens of the longest sequence, prompt and output together.
        max_tokens_per_step: the scheduler's token budget; sizes the pools of window groups.
        max_in_flight: steps that may be launched and not yet applied; sizes the pools of window groups.
        enable_prefix_cache: look up and keep prefixes. Off: `match` finds nothing.
        eviction: which unused page goes first: `lru`, or `next-use` (see `CacheManager.set_future`).
        strategy: what a hit means for window groups: `bounded`, `exact`, `full` or `periodic(p)`.
        num_layers: layers with a window, read by the `exact` strategy only.
        max_checkpoints: windows that `periodic(p)` keeps at most; the least recently used goes first.
        partial_hits: share also the first tokens of a page that parts later, by copying it. Needs a mover.
    """

    groups: tuple[CacheGroup, ...]
    num_pages: int
    max_running: int = 64
    max_model_len: int = 4096
    max_tokens_per_step: int = 2048
    max_in_flight: int = 2
    enable_prefix_cache: bool = True
    eviction: Eviction = "lru"
    strategy: str = "bounded"
    num_layers: int = 1
    max_checkpoints: int = 64
    partial_hits: bool = False

    def __post_init__(self) -> None:
        names = [group.name for group in self.groups]
        if not names or len(set(names)) != len(names):
            raise CacheConfigError(f"groups need distinct names and there must be one; got {names}")
        for field in (
            "num_pages",
            "max_running",
            "max_model_len",
            "max_tokens_per_step",
            "max_in_flight",
            "num_layers",
        ):
            if getattr(self, field) < 1:
                raise CacheConfigError(f"{field} {getattr(self, field)} must be at least 1")
        if self.eviction not in ("lru", "next-use"):
            raise CacheConfigError(f"eviction {self.eviction!r} is not one of lru, next-use")
        if self.max_checkpoints < 0:
            raise CacheConfigError(f"max_checkpoints {self.max_checkpoints} must not be negative")
        make_strategy(self.strategy, self.window, self.num_layers, self.alignment)

    @property
    def window(self) -> int:
        """The widest window of any group; 0 without window groups."""
        return max((group.window for group in self.groups if group.kind == "window"), default=0)

    @property
    def prefix_groups(self) -> tuple[CacheGroup, ...]:
        """Groups that live in pages: those of kind `prefix`, and under the strategy `full` windows too."""
        kinds = ("prefix", "window") if self.strategy == "full" else ("prefix",)
        return tuple(group for group in self.groups if group.kind in kinds)

    @property
    def window_groups(self) -> tuple[CacheGroup, ...]:
        """Groups that have blocks for the last positions only."""
        return tuple(group for group in self.groups if group.kind == "window" and self.strategy != "full")

    @property
    def alignment(self) -> int:
        """Tokens that are a whole number of blocks in every group that has blocks of tokens, and a `hit_multiple`."""
        sizes = (group.block_size for group in self.groups if group.kind != "state")
        return math.lcm(self.hit_multiple, *sizes)

    @property
    def hit_multiple(self) -> int:
        """Tokens after which no group has state that only rows before a hit could rebuild."""
        return math.lcm(*(group.hit_multiple for group in self.groups))

    @property
    def page_size(self) -> int:
        """Tokens of one page: the least common multiple of the prefix groups' block sizes (all groups', without any)."""
        return math.lcm(*(group.block_size for group in self.prefix_groups or self.groups))

    @property
    def entry_tokens(self) -> int:
        """Tokens that are a whole number of entries in every prefix group."""
        return math.lcm(*(group.tokens_per_entry for group in self.prefix_groups))

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all prefix groups."""
        return sum(group.block_bytes * (self.page_size // group.block_size) for group in self.prefix_groups)

    @property
    def max_pages(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.max_model_len // self.page_size)

    def window_blocks(self, group: CacheGroup) -> int:
        """Usable blocks of a window group: no plan within the token budget can need more.

        When a step is planned, `max_in_flight - 1` steps are in flight. Blocks are then held by the windows of all
        slots, and by the rows of these steps and of the new one: even those that no later row reads, and those of
        sequences that ended, since a step in flight still uses them. n rows that begin inside a block touch at most
        n / block_size + 2 blocks, and a window of W positions at most ceil(W / block_size) + 1.
        """
        window = -(-group.window // group.block_size) + 1
        rows = -(-self.max_tokens_per_step // group.block_size) + 2 * self.max_running
        kept = self.max_checkpoints * window if self.strategy.startswith("periodic") else 0
        return self.max_running * (window + 1) + self.max_in_flight * rows + kept
