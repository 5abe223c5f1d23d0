"""Blocks of window groups: only the last `window` positions of a running sequence have one."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np

from deepinfer_cache.config import CacheConfig
from deepinfer_cache.group import CacheGroup


class WindowBlocks:
    """The pool and the block table of one window group.

    The table is indexed by absolute position (`position // block_size`); entries outside the window are 0, the block
    that nobody owns. The pool is sized so that a step plan within the token budget always fits
    (`CacheConfig.window_blocks`), as long as blocks are let go of as soon as no later row reads them. Blocks are counted,
    because a kept window (`keep`) shares its blocks with the sequences that start from it; shared blocks are never
    written, since a window is kept at a block boundary.
    """

    def __init__(self, group: CacheGroup, config: CacheConfig) -> None:
        self.group = group
        self.num_blocks = config.window_blocks(group)
        self.table = np.zeros((config.max_running, -(-config.max_model_len // group.block_size)), np.int32)
        self.refs = [0] * (self.num_blocks + 1)
        self._max_kept = config.max_checkpoints
        self._first = np.zeros(config.max_running, np.int64)  # held blocks: [first, last) of the table row
        self._last = np.zeros(config.max_running, np.int64)
        self._needed = np.zeros(config.max_running, np.int64)  # the first block that a slot's next row may read
        self._completed = 0
        self._free = list(range(self.num_blocks, 0, -1))
        self._fenced: deque[tuple[int, list[int]]] = deque()
        self._kept: OrderedDict[bytes, list[int]] = OrderedDict()  # the least recently used comes first

    @property
    def used(self) -> int:
        """Blocks in use: by sequences, kept windows, and behind a fence."""
        return self.num_blocks - len(self._free)

    def open(self, slot: int, window_start: int, checkpoint: bytes | None, start: int) -> None:
        """A sequence takes an empty slot.

        Args:
            slot: the slot.
            window_start: first position that needs a place.
            checkpoint: key of a kept window that ends at `start`, or None.
            start: first position that will be computed.
        """
        assert self._last[slot] == self._first[slot], f"slot {slot} of {self.group.name} still holds blocks"
        size = self.group.block_size
        self._first[slot] = self._last[slot] = self._needed[slot] = window_start // size
        if checkpoint is not None:
            blocks = self._kept[checkpoint]
            self._kept.move_to_end(checkpoint)
            self._share(blocks)
            self._last[slot] = start // size
            self.table[slot, self._first[slot] : self._last[slot]] = blocks

    def place(self, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray, nexts: np.ndarray, fence: int) -> None:
        """Give rows [start, end) of each slot a place, and let go of what no later row of any slot can read.

        Args:
            slots: int [R], distinct.
            starts: int [R], first computed position.
            ends: int [R], one past the last computed position.
            nexts: int [R], lowest position at which the slot's next row may start.
            fence: the last step that may still read what is let go of.
        """
        size = self.group.block_size
        self._needed[slots] = self._first_block(starts)
        for slot in np.flatnonzero(self._needed > self._first).tolist():
            first = int(self._needed[slot])
            self._retire(slot, int(self._first[slot]), min(first, int(self._last[slot])), fence)
            self._first[slot] = first
            self._last[slot] = max(first, int(self._last[slot]))
        self.complete(self._completed)
        last = np.maximum(-(-ends // size), self._last[slots])
        grown = np.flatnonzero(last > self._last[slots])
        for slot, end in zip(slots[grown].tolist(), last[grown].tolist(), strict=True):
            begin = int(self._last[slot])
            self.table[slot, begin:end] = self._take(end - begin)
            self._last[slot] = end
        self._needed[slots] = self._first_block(nexts)

    def keep(self, slot: int, position: int, key: bytes) -> None:
        """Keep the window that ends at `position` (a block boundary) under `key`; its rows have a place by now."""
        size = self.group.block_size
        first, last = max(0, position - self.group.window + 1) // size, position // size
        if key in self._kept or not self._max_kept or first < self._first[slot] or last > self._last[slot]:
            return
        if len(self._kept) == self._max_kept:
            self._drop(self._kept.popitem(last=False)[1])
        blocks = self.table[slot, first:last].tolist()
        self._share(blocks)
        self._kept[key] = blocks

    def find_kept(self, keys: Sequence[bytes]) -> int:
        """How many of `keys` lead up to the last one whose window is kept; 0 if none is."""
        return next((count for count in range(len(keys), 0, -1) if keys[count - 1] in self._kept), 0)

    def close(self, slot: int, fence: int) -> None:
        """The slot's sequence is gone; its blocks are handed out again after step `fence`."""
        self._retire(slot, int(self._first[slot]), int(self._last[slot]), fence)
        self._first[slot] = self._last[slot] = self._needed[slot] = 0

    def complete(self, step: int) -> None:
        """Steps up to `step` read nothing any more."""
        self._completed = max(self._completed, step)
        while self._fenced and self._fenced[0][0] <= self._completed:
            self._drop(self._fenced.popleft()[1])

    def forget_kept(self) -> None:
        """Drop every kept window."""
        while self._kept:
            self._drop(self._kept.popitem()[1])

    def holders(self) -> list[list[int]]:
        """Every list of blocks that somebody holds (one reference each), for `integrity.check`."""
        rows = [self.table[slot, first:last].tolist() for slot, (first, last) in enumerate(self._ranges())]
        return [*rows, *(blocks for _, blocks in self._fenced), *self._kept.values()]

    def free_blocks(self) -> list[int]:
        """Blocks that nobody holds, for `integrity.check`."""
        return list(self._free)

    def _ranges(self) -> list[tuple[int, int]]:
        return list(zip(self._first.tolist(), self._last.tolist(), strict=True))

    def _first_block(self, positions: np.ndarray) -> np.ndarray:
        """The first block that a row at each position reads."""
        return np.maximum(positions - self.group.window + 1, 0) // self.group.block_size

    def _take(self, count: int) -> list[int]:
        assert count <= len(self._free), (
            f"{self.group.name}: {count} blocks asked, {len(self._free)} of {self.num_blocks} are free; "
            "was a step planned beyond max_tokens_per_step or max_in_flight?"
        )
        blocks = [self._free.pop() for _ in range(count)]
        self._share(blocks)
        return blocks

    def _share(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.refs[block] += 1

    def _drop(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            assert self.refs[block] > 0, f"block {block} of {self.group.name} released more often than used"
            self.refs[block] -= 1
            if not self.refs[block]:
                self._free.append(block)

    def _retire(self, slot: int, first: int, last: int, fence: int) -> None:
        if first < last:
            self._fenced.append((fence, self.table[slot, first:last].tolist()))
            self.table[slot, first:last] = 0
