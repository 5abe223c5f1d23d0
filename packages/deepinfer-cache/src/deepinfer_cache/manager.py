"""Blocks, tables and the prefix index of one engine."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from deepinfer_cache.config import CacheConfig
from deepinfer_cache.errors import CacheConfigError, SlotError
from deepinfer_cache.eviction import LruEvictor, NextUseEvictor
from deepinfer_cache.hashing import chain_hashes
from deepinfer_cache.hit import MISS, Hit
from deepinfer_cache.mover import LowerTier, PageMover
from deepinfer_cache.pool import PagePool
from deepinfer_cache.saving import SaveQueue
from deepinfer_cache.stats import CacheStats
from deepinfer_cache.strategy import Resume, make_strategy
from deepinfer_cache.window import WindowBlocks


class CacheManager:
    """Holds every cached block of an engine. Single-threaded.

    Steps are numbered by the caller and may overlap: `begin(n)` opens the planning of step n, `complete(n)` says that
    the device is done with it. What is released in between is handed out again only after every step that may read
    it is complete.

    A slot's life: `match` -> `allocate(slot, tokens, hit)` -> for each step `allocate(slot, end)` (grow) and
    `place_windows` -> `commit` whenever pages are full -> `free`.

    Args:
        config: sizes and policies.
        mover: moves page contents; needed for `partial_hits` and for a `store`.
        store: a lower tier (host memory, disk) that pages are saved to and found in.
    """

    def __init__(self, config: CacheConfig, mover: PageMover | None = None, store: LowerTier | None = None) -> None:
        if mover is None and (config.partial_hits or store is not None):
            raise CacheConfigError("partial_hits and a store move pages, so they need a mover")
        self.config = config
        self.page_size = config.page_size
        self.pages = np.zeros((config.max_running, config.max_pages), np.int32)
        self.strategy = make_strategy(config.strategy, config.window, config.num_layers, config.alignment)
        self._evictor = NextUseEvictor() if config.eviction == "next-use" else LruEvictor()
        self._pool = PagePool(config.num_pages, self._evictor)
        self._windows = {group.name: WindowBlocks(group, config) for group in config.window_groups}
        slots = np.arange(1, config.max_running + 1, dtype=np.int32)[:, None]
        self._states = {group.name: slots for group in config.groups if group.kind == "state"}
        self._blocks_per_page = {group.name: self.page_size // group.block_size for group in config.prefix_groups}
        self._mover = mover
        self._store = store
        self._saves = SaveQueue()
        self._held = np.zeros(config.max_running, np.int64)  # pages of each slot
        self._committed = np.zeros(config.max_running, np.int64)  # leading pages of each slot that are findable
        self._open = np.zeros(config.max_running, bool)
        self._fenced: deque[tuple[int, list[int]]] = deque()
        self._fenced_pages = 0
        self._completed = 0
        self._step = 0
        self._stats = CacheStats(pages=config.num_pages)

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
        per_page = self._pages_of(group)
        if per_page == 1:
            return self.pages
        blocks = self.pages[:, :, None] * per_page + np.where(self.pages > 0, 1, 0)[:, :, None] * np.arange(per_page)
        return blocks.reshape(self.config.max_running, -1).astype(np.int32)

    def num_blocks(self, group: str) -> int:
        """Blocks that the device must hold for a group, block 0 included."""
        if group in self._windows:
            return self._windows[group].num_blocks + 1
        if group in self._states:
            return self.config.max_running + 1
        return (self.config.num_pages + 1) * self._pages_of(group)

    # --- lookup ----------------------------------------------------------------------------------------------

    def hash_tokens(self, token_ids: Sequence[int], salt: bytes = b"", known: Sequence[bytes] = ()) -> list[bytes]:
        """Digests of the full pages of `token_ids` (see `hashing.chain_hashes`)."""
        return chain_hashes(token_ids, self.page_size, salt, known)

    def match(self, hashes: Sequence[bytes], num_tokens: int, tokens: Sequence[int] | None = None) -> Hit:
        """Longest cached prefix of a sequence of `num_tokens` tokens.

        Changes nothing on the device; pages that only a lower tier has are brought to host memory.

        Args:
            hashes: digests of its full pages (`hash_tokens`); fewer, or none, look for less.
            num_tokens: tokens of the sequence.
            tokens: its ids; with them, `partial_hits` also finds the first tokens of a page that parts later.
        """
        if not self.config.enable_prefix_cache:
            return MISS
        limit = self.strategy.max_hit(num_tokens)
        wanted = hashes[: limit // self.page_size]
        pages = self._pool.lookup(wanted)
        stored = 0 if self._store is None else self._store.fetch(wanted[len(pages) :])
        found = len(pages) + stored
        partial = None
        if self.config.partial_hits and tokens is not None and found and not stored:
            partial = self._find_partial(hashes[found - 1], tokens[found * self.page_size : limit])
        length = found * self.page_size + (partial[1] if partial is not None else 0)
        if not length:
            return MISS
        kept, resume = self._resume(hashes[:found], length, num_tokens)
        multiple = self.config.hit_multiple
        if resume.start > length - length % multiple:  # state of the open multiple would be missing
            length -= length % math.lcm(self.page_size, multiple)
            found, partial = length // self.page_size, None
            kept, resume = self._resume(hashes[:found], length, num_tokens)
        if not resume.length:
            return MISS
        checkpoint = hashes[kept - 1] if kept else None
        return Hit.of(resume, pages[:found], wanted[len(pages) : found], partial, checkpoint)

    @property
    def wants_future(self) -> bool:
        """Whether `expect` and `meet` make a difference (eviction `next-use`)."""
        return isinstance(self._evictor, NextUseEvictor)

    def expect(self, hashes: Sequence[bytes], position: int) -> None:
        """The request at `position` of the job will look for `hashes`; with eviction `next-use` they are kept for it."""
        if isinstance(self._evictor, NextUseEvictor):
            self._evictor.expect(hashes, position)

    def meet(self, hashes: Sequence[bytes], position: int) -> None:
        """The request at `position` was admitted, or will never be."""
        if isinstance(self._evictor, NextUseEvictor):
            self._evictor.meet(hashes, position)

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
        """Pages that become available, at most, when the steps in flight are complete."""
        return self._fenced_pages

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def held_pages(self, slots: np.ndarray) -> np.ndarray:
        """Pages of each slot, int64, shape of `slots`."""
        return self._held[slots]

    def can_admit(self, hit: Hit, num_tokens: int, reserve: int = 0) -> bool:
        """Whether `allocate` would open a slot with this hit and leave `reserve` pages available."""
        source = () if hit.partial is None else (hit.partial[0],)
        idle = sum(1 for page in (*hit.pages, *source) if self._pool.refs[page] == 0)
        return self.pages_for(num_tokens) - len(hit.pages) + reserve <= self._pool.available - idle

    def allocate(self, slot: int, num_tokens: int, hit: Hit | None = None) -> bool:
        """Make room for positions below `num_tokens`; with `hit`, open the slot first and share the hit's pages.

        Returns:
            False, and nothing changed, when there are not enough pages.
        """
        if hit is not None:
            return self._admit(slot, num_tokens, hit)
        if not self._open[slot]:
            raise SlotError(f"slot {slot} is not open; allocate it with a hit first (MISS if nothing was found)")
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

    def place_windows(
        self, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray, nexts: np.ndarray | None = None
    ) -> None:
        """Give the rows of the step that is being planned a place in every window group. Call it after `commit`.

        Args:
            slots: int32 [R], distinct.
            starts: int32 [R], first computed position of each row.
            ends: int32 [R], one past the last.
            nexts: int32 [R], lowest position at which the sequence's next row may start: `ends` less the drafts of the
                row, which may all be rejected. None: `ends`, no row has drafts.
        """
        for blocks in self._windows.values():
            blocks.place(slots, starts, ends, ends if nexts is None else nexts, fence=self._step - 1)
        period = self.strategy.period
        if period:
            for row in np.flatnonzero(ends // period > starts // period).tolist():
                self._keep_windows(int(slots[row]), int(starts[row]), int(ends[row]), period)

    def commit(self, slot: int, hashes: Sequence[bytes], num_tokens: int, tokens: Sequence[int] | None = None) -> None:
        """Make the slot's full pages below `num_tokens` findable under `hashes` (from `hash_tokens`).

        Their entries are written by a step that is planned or done; a later step may read them.

        Args:
            slot: the slot.
            hashes: digests of the sequence's full pages.
            num_tokens: tokens whose entries are written or planned.
            tokens: the sequence's ids, for `partial_hits`.
        """
        if not self.config.enable_prefix_cache:
            return
        first, last = int(self._committed[slot]), min(num_tokens // self.page_size, len(hashes), int(self._held[slot]))
        for index in range(first, last):
            page = int(self.pages[slot, index])
            if self._pool.publish(page, hashes[index]) and self._store is not None:
                self._saves.add(page, hashes[index], self._step)
        if self.config.partial_hits and tokens is not None:
            self._note_partial(slot, hashes, tokens, first, num_tokens)
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

    # --- steps and tiers -------------------------------------------------------------------------------------

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

    def complete_all(self) -> None:
        """No step is in flight, so whatever a step was to write is written."""
        self.complete(self._step)

    @property
    def pending_saves(self) -> int:
        """Pages that `save` has yet to look at."""
        return len(self._saves)

    def save(self, limit: int = 64) -> int:
        """Copy up to `limit` finished pages that the lower tier lacks to it, in one batch. Returns how many."""
        if self._store is None or self._mover is None:
            return 0
        due = [
            (page, key)
            for page, key in self._saves.take(self._completed, limit)
            if self._pool.keys[page] == key and self._store.wants(key)
        ]
        if due:
            self._store.put([key for _, key in due], self._mover.read([page for page, _ in due]))
            self._stats.saved_pages += len(due)
        return len(due)

    def reset_prefix_cache(self) -> int:
        """Forget every prefix that no sequence uses. Returns how many pages that were."""
        for blocks in self._windows.values():
            blocks.forget_kept()
        return self._pool.forget_unused()

    def stats(self) -> CacheStats:
        """A snapshot of the counters."""
        stats = self._stats
        stats.evictions = self._pool.evictions
        stats.used_pages = self._pool.used
        stats.cached_pages = len(self._evictor)
        return stats

    # --- inside ----------------------------------------------------------------------------------------------

    def _pages_of(self, group: str) -> int:
        per_page = self._blocks_per_page.get(group)
        if per_page is None:
            raise CacheConfigError(f"no group {group!r}; there are {[g.name for g in self.config.groups]}")
        return per_page

    def _find_partial(self, parent: bytes, tokens: Sequence[int]) -> tuple[int, int] | None:
        page, length = self._pool.partial.find(parent, tokens[: self.page_size], self._step)
        length -= length % self.config.entry_tokens
        return (page, length) if length else None

    def _note_partial(
        self, slot: int, hashes: Sequence[bytes], tokens: Sequence[int], first: int, num_tokens: int
    ) -> None:
        for index in range(max(first, 1), min(self.pages_for(num_tokens), len(hashes) + 1)):
            begin, end = index * self.page_size, min((index + 1) * self.page_size, num_tokens)
            self._pool.partial.note(hashes[index - 1], int(self.pages[slot, index]), tokens[begin:end], self._step)

    def _resume(self, hashes: Sequence[bytes], length: int, num_tokens: int) -> tuple[int, Resume]:
        """Leading pages that end with a kept window, and how to go on after a hit of `length` in pages `hashes`."""
        kept = self._kept_pages(hashes)
        return kept, self.strategy.resume(length, num_tokens, kept * self.page_size)

    def _kept_pages(self, hashes: Sequence[bytes]) -> int:
        """Leading pages up to the last one at which every window group has a kept window."""
        if not self.strategy.period or not self._windows:
            return 0
        kept = len(hashes)
        for blocks in self._windows.values():
            kept = blocks.find_kept(hashes[:kept])
        return kept

    def _keep_windows(self, slot: int, start: int, end: int, period: int) -> None:
        for position in range((start // period + 1) * period, end + 1, period):
            key = self._pool.keys[self.pages[slot, position // self.page_size - 1]]
            if key is not None:
                for blocks in self._windows.values():
                    blocks.keep(slot, position, key)

    def _admit(self, slot: int, num_tokens: int, hit: Hit) -> bool:
        if self._open[slot]:
            raise SlotError(f"slot {slot} is in use; free it before it is opened again")
        if not self.can_admit(hit, num_tokens):
            return False
        source = [] if hit.partial is None else [hit.partial[0]]
        self._pool.share([*hit.pages, *source])
        shared = len(hit.pages)
        fresh = self._pool.take(max(0, self.pages_for(num_tokens) - shared))
        if self._mover is not None and (hit.stored or source):
            self._fill(hit, fresh)
        self._pool.release(source)
        self.pages[slot, :shared] = hit.pages
        self.pages[slot, shared : shared + len(fresh)] = fresh
        self._held[slot], self._committed[slot] = shared + len(fresh), shared + len(hit.stored)
        self._open[slot] = True
        for blocks in self._windows.values():
            blocks.open(slot, hit.window_start, hit.checkpoint, hit.start)
        self._count_admission(hit, num_tokens)
        return True

    def _fill(self, hit: Hit, fresh: list[int]) -> None:
        """Load pages from the lower tier, and copy the page that parts in the middle."""
        assert self._mover is not None
        if hit.stored:
            assert self._store is not None
            loaded = fresh[: len(hit.stored)]
            self._mover.write(loaded, self._store.take(hit.stored))
            for page, key in zip(loaded, hit.stored, strict=True):
                self._pool.publish(page, key)
            self._stats.loaded_pages += len(loaded)
        if hit.partial is not None:
            self._mover.copy([hit.partial[0]], [fresh[len(hit.stored)]])
            self._stats.copied_pages += 1

    def _count_admission(self, hit: Hit, num_tokens: int) -> None:
        self._stats.queries += 1
        self._stats.query_tokens += num_tokens
        self._stats.hit_tokens += hit.length
        self._note_peak()

    def _note_peak(self) -> None:
        self._stats.peak_used_pages = max(self._stats.peak_used_pages, self._pool.used)
