"""Blocks, tables and the prefix index of one engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from deepinfer_cache.config import CacheConfig
from deepinfer_cache.errors import CacheConfigError, SlotError
from deepinfer_cache.eviction import Evictor, LruEvictor
from deepinfer_cache.hashing import chain_hashes
from deepinfer_cache.hit import MISS, Hit
from deepinfer_cache.pool import PagePool
from deepinfer_cache.stats import CacheStats
from deepinfer_cache.window import WindowBlocks


class CacheManager:
    """Holds every cached block of an engine. Single-threaded.

    Steps are numbered by the caller and may overlap: `begin(n)` opens the planning of step n, `complete(n)` says that
    the device is done with it. What is released in between is handed out again only after every step that may read
    it is complete.

    A slot's life: `match` -> `allocate(slot, tokens, hit)` -> for each step `allocate(slot, end)` (grow) and
    `place_windows` -> `commit` whenever pages are full -> `free`.
    """

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.page_size = config.page_size
        self.pages = np.zeros((config.max_running, config.max_pages), np.int32)
        self._pool = PagePool(config.num_pages, _make_evictor(config))
        self._windows = {group.name: WindowBlocks(group, config) for group in config.window_groups}
        self._states = {
            group.name: np.arange(1, config.max_running + 1, dtype=np.int32)[:, None]
            for group in config.groups
            if group.kind == "state"
        }
        self._held = np.zeros(config.max_running, np.int64)  # pages of each slot
        self._committed = np.zeros(config.max_running, np.int64)  # leading pages of each slot that are findable
        self._open = np.zeros(config.max_running, bool)
        self._fenced: deque[tuple[int, list[int]]] = deque()
        self._fenced_pages = 0
        self._completed = 0
        self._step = 0
        self._stats = CacheStats(pages=config.num_pages)
        self._expanded = {group.name: self._expanded_table(group.block_size) for group in config.prefix_groups}

    # --- what the runner reads -------------------------------------------------------------------------------

    def block_table(self, group: str) -> np.ndarray:
        """The block table of a group, int32 [max_running, max_blocks], indexed by slot.

        Entry [slot, i] is the block of positions i*block_size .. (i+1)*block_size-1; 0 is the block that nobody owns.
        For one block a page (the usual case) and for window groups this is the live table, not a copy: read it
        before the next plan is made. State groups have one column.
        """
        if group in self._windows:
            return self._windows[group].table
        if group in self._states:
            return self._states[group]
        per_page = self._expanded.get(group)
        if per_page is None:
            raise CacheConfigError(f"no group {group!r}; there are {[g.name for g in self.config.groups]}")
        if per_page == 1:
            return self.pages
        blocks = self.pages[:, :, None] * per_page + np.arange(per_page, dtype=np.int32)
        return blocks.reshape(self.config.max_running, -1)

    def num_blocks(self, group: str) -> int:
        """Blocks that the device must hold for a group, block 0 included."""
        if group in self._windows:
            return self._windows[group].num_blocks + 1
        if group in self._states:
            return self.config.max_running + 1
        return (self.config.num_pages + 1) * self._expanded[group]

    # --- lookup ----------------------------------------------------------------------------------------------

    def hash_tokens(self, token_ids: Sequence[int], salt: bytes = b"", known: Sequence[bytes] = ()) -> list[bytes]:
        """Digests of the full pages of `token_ids` (see `hashing.chain_hashes`)."""
        return chain_hashes(token_ids, self.page_size, salt, known)

    def match(self, hashes: Sequence[bytes], num_tokens: int) -> Hit:
        """Longest cached prefix of a sequence of `num_tokens` tokens. Changes nothing.

        Without window groups at least one token is left to compute, since its logits are needed; with them the
        replay computes it (V4.1 notes 4.2, rule 6).
        """
        if not self.config.enable_prefix_cache:
            return MISS
        limit = num_tokens if self._windows else num_tokens - 1
        pages = self._pool.lookup(hashes[: limit // self.page_size])
        return self._hit(tuple(pages))

    # --- allocation ------------------------------------------------------------------------------------------

    @property
    def num_pages(self) -> int:
        """Usable pages, used or not."""
        return self.config.num_pages

    @property
    def available_pages(self) -> int:
        """Pages that `allocate` can hand out now."""
        return self._pool.available

    @property
    def fenced_pages(self) -> int:
        """Pages that become available when the steps in flight are complete."""
        return self._fenced_pages

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def held_pages(self, slots: np.ndarray) -> np.ndarray:
        """Pages of each slot, int64, shape of `slots`."""
        return self._held[slots]

    def can_admit(self, hit: Hit, num_tokens: int, reserve: int = 0) -> bool:
        """Whether `allocate` would open a slot with this hit and leave `reserve` pages available."""
        idle = sum(1 for page in hit.pages if self._pool.refs[page] == 0)
        return self.pages_for(num_tokens) - len(hit.pages) + reserve <= self._pool.available - idle

    def allocate(self, slot: int, num_tokens: int, hit: Hit | None = None) -> bool:
        """Make room for positions below `num_tokens`; with `hit`, open the slot first and share the hit's pages.

        Returns:
            False, and nothing changed, when there are not enough pages.
        """
        if hit is not None:
            return self._admit(slot, num_tokens, hit)
        if not self._open[slot]:
            raise SlotError(f"slot {slot} is not open; allocate it with a hit first (hit.MISS if nothing was found)")
        held = int(self._held[slot])
        need = self.pages_for(num_tokens) - held
        if need <= 0:
            return True
        if need > self._pool.available:
            return False
        self.pages[slot, held : held + need] = self._pool.take(need)
        self._held[slot] += need
        self._note_peak()
        return True

    def place_windows(self, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        """Give the rows of the step that is being planned a place in every window group.

        Args:
            slots: int32 [R], distinct.
            starts: int32 [R], first computed position of each row.
            ends: int32 [R], one past the last.
        """
        for blocks in self._windows.values():
            blocks.place(slots, starts, ends, fence=self._step - 1)

    def commit(self, slot: int, hashes: Sequence[bytes], num_tokens: int) -> None:
        """Make the slot's full pages below `num_tokens` findable under `hashes` (from `hash_tokens`).

        Their entries are written by a step that is planned or done; a later step may read them.
        """
        if not self.config.enable_prefix_cache:
            return
        first, last = int(self._committed[slot]), min(num_tokens // self.page_size, len(hashes), int(self._held[slot]))
        for index in range(first, last):
            self._pool.publish(int(self.pages[slot, index]), hashes[index])
        self._committed[slot] = max(first, last)

    def free(self, slot: int, fence: int | None = None) -> None:
        """End a slot. Its pages return to the pool once step `fence` is complete (default: the step being planned).

        The slot itself can be opened again at once; keep it unused while a step in flight has a row of it.
        """
        if not self._open[slot]:
            raise SlotError(f"slot {slot} is freed, but it is not open")
        fence = self._step if fence is None else fence
        held = int(self._held[slot])
        pages = self.pages[slot, :held].tolist()
        self.pages[slot, :held] = 0
        self._held[slot] = self._committed[slot] = 0
        self._open[slot] = False
        for blocks in self._windows.values():
            blocks.close(slot, fence)
        self._fenced.append((fence, pages))
        self._fenced_pages += len(pages)
        self.complete(self._completed)

    # --- steps -----------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """The planning of `step` begins; steps before it may still be in flight."""
        self._step = step

    def complete(self, step: int) -> None:
        """The device is done with every step up to `step`."""
        self._completed = max(self._completed, step)
        while self._fenced and self._fenced[0][0] <= self._completed:
            pages = self._fenced.popleft()[1]
            self._fenced_pages -= len(pages)
            self._pool.release(pages)
        for blocks in self._windows.values():
            blocks.complete(self._completed)

    def reset_prefix_cache(self) -> int:
        """Forget every prefix that no sequence uses. Returns how many pages that were."""
        return self._pool.forget_unused()

    def stats(self) -> CacheStats:
        """A snapshot of the counters."""
        stats = self._stats
        stats.evictions = self._pool.evictions
        stats.used_pages = self._pool.used
        stats.cached_pages = len(self._pool.evictor)
        return stats

    # --- inside ----------------------------------------------------------------------------------------------

    def _expanded_table(self, block_size: int) -> int:
        return self.page_size // block_size

    def _hit(self, pages: tuple[int, ...]) -> Hit:
        length = len(pages) * self.page_size
        window = max((group.window for group in self.config.window_groups), default=0)
        if not window:
            return Hit(length, pages, length, 0, length)
        if length <= window:
            return MISS
        return Hit(length, pages, length - window, length - window, length)

    def _admit(self, slot: int, num_tokens: int, hit: Hit) -> bool:
        if self._open[slot]:
            raise SlotError(f"slot {slot} is in use; free it before it is opened again")
        if not self.can_admit(hit, num_tokens):
            return False
        self._pool.share(hit.pages)
        shared = len(hit.pages)
        fresh = self._pool.take(max(0, self.pages_for(num_tokens) - shared))
        self.pages[slot, :shared] = hit.pages
        self.pages[slot, shared : shared + len(fresh)] = fresh
        self._held[slot], self._committed[slot] = shared + len(fresh), shared
        self._open[slot] = True
        for blocks in self._windows.values():
            blocks.open(slot, hit.start)
        self._stats.queries += 1
        self._stats.query_tokens += num_tokens
        self._stats.hit_tokens += hit.length
        self._note_peak()
        return True

    def _note_peak(self) -> None:
        self._stats.peak_used_pages = max(self._stats.peak_used_pages, self._pool.used)


def _make_evictor(config: CacheConfig) -> Evictor:
    return LruEvictor()
