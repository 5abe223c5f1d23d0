"""Blocks of window groups: only the last `window` positions of a running sequence have one."""

from __future__ import annotations

from collections import deque

import numpy as np

from deepinfer_cache.config import CacheConfig
from deepinfer_cache.group import CacheGroup


class WindowBlocks:
    """The pool and the block table of one window group.

    The table is indexed by absolute position (`position // block_size`); entries outside the window are 0, the block
    that nobody owns. The pool is sized so that a step plan within the token budget always fits.
    """

    def __init__(self, group: CacheGroup, config: CacheConfig) -> None:
        self.group = group
        self.num_blocks = config.window_blocks(group)
        self.table = np.zeros((config.max_running, -(-config.max_model_len // group.block_size)), np.int32)
        self._first = np.zeros(config.max_running, np.int64)  # held blocks: [first, last) of the table row
        self._last = np.zeros(config.max_running, np.int64)
        self._free = list(range(self.num_blocks, 0, -1))
        self._fenced: deque[tuple[int, list[int]]] = deque()

    @property
    def used(self) -> int:
        """Blocks in use, those behind a fence included."""
        return self.num_blocks - len(self._free)

    def open(self, slot: int, start: int) -> None:
        """A sequence takes an empty slot and will compute from position `start` on."""
        assert self._last[slot] == self._first[slot], f"slot {slot} of {self.group.name} still holds blocks"
        self._first[slot] = self._last[slot] = start // self.group.block_size

    def place(self, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray, fence: int) -> None:
        """Give rows [start, end) of each slot a place, and let go of what no later row can read.

        Args:
            slots: int [R], distinct.
            starts: int [R], first computed position.
            ends: int [R], one past the last computed position.
            fence: the last step that may still read what is let go of.
        """
        size = self.group.block_size
        first = np.maximum(np.maximum(starts - self.group.window + 1, 0) // size, self._first[slots])
        last = np.maximum(-(-ends // size), self._last[slots])
        changed = np.flatnonzero((first != self._first[slots]) | (last != self._last[slots]))
        for slot, new_first, new_last in zip(slots[changed], first[changed], last[changed], strict=True):
            old_first, old_last = int(self._first[slot]), int(self._last[slot])
            self._retire(slot, old_first, min(int(new_first), old_last), fence)
            begin = max(old_last, int(new_first))
            for block in range(begin, int(new_last)):
                self.table[slot, block] = self._free.pop()
            self._first[slot], self._last[slot] = new_first, new_last

    def close(self, slot: int, fence: int) -> None:
        """The slot's sequence is gone; its blocks are handed out again after step `fence`."""
        self._retire(slot, int(self._first[slot]), int(self._last[slot]), fence)
        self._first[slot] = self._last[slot] = 0

    def complete(self, step: int) -> None:
        """Steps up to `step` read nothing any more."""
        while self._fenced and self._fenced[0][0] <= step:
            self._free.extend(self._fenced.popleft()[1])

    def _retire(self, slot: int, first: int, last: int, fence: int) -> None:
        if first < last:
            self._fenced.append((fence, self.table[slot, first:last].tolist()))
            self.table[slot, first:last] = 0
