"""What running sequences add to the prefix index, and who is about to add it."""

from __future__ import annotations

import numpy as np

from deepinfer_sched.cache import Cache
from deepinfer_sched.running import RunningSet
from deepinfer_sched.sequence import Sequence


class PrefixWork:
    """Publishes pages as steps fill them, and knows which pages somebody is about to fill.

    A waiting sequence that would compute such a page once more had better wait for it: the one step costs nothing,
    computing it twice costs its prefill and its memory.
    """

    def __init__(self, cache: Cache, running: RunningSet) -> None:
        self._cache = cache
        self._running = running
        self._computing: dict[bytes, int] = {}  # page key -> sequence whose prefill will fill that page

    def is_computing(self, seq: Sequence, found: int) -> bool:
        """Whether another sequence is about to fill the page that `seq` misses after `found` pages."""
        return found < len(seq.hashes) and self._computing.get(seq.hashes[found], seq.seq_id) != seq.seq_id

    def admit(self, seq: Sequence, found: int) -> None:
        """`seq` will fill its pages after the first `found`."""
        self._running.state.committed[seq.slot] = found
        for key in seq.hashes[found:]:
            self._computing.setdefault(key, seq.seq_id)

    def commit_prompt(self, seq: Sequence, end: int) -> None:
        """Prompt pages below `end` are filled by the step that is being planned."""
        state = self._running.state
        first, last = int(state.committed[seq.slot]), min(end // self._cache.page_size, len(seq.hashes))
        if last <= first and end < state.target[seq.slot]:
            return
        self._cache.commit(seq.slot, seq.hashes, end, seq.tokens)
        state.committed[seq.slot] = max(first, last)
        self._forget(seq, first, last)

    def commit_generated(self, slots: np.ndarray) -> None:
        """Publish pages that were filled with generated tokens; their ids are known only now."""
        state, page_size = self._running.state, self._cache.page_size
        known = np.minimum(state.computed[slots], state.length[slots])
        due = (known // page_size > state.committed[slots]) & (state.computed[slots] >= state.target[slots])
        due &= state.seq_ids[slots] >= 0
        for slot, tokens in zip(slots[due], known[due].tolist(), strict=True):
            (seq,) = self._running.in_slots(slot[None])
            seq.hashes = self._cache.hash_tokens(seq.tokens, seq.salt, seq.hashes)
            self._cache.commit(int(slot), seq.hashes, tokens, seq.tokens)
            state.committed[slot] = tokens // page_size

    def leave(self, seq: Sequence) -> None:
        """`seq` gives up its slot: nobody waits for what it did not fill."""
        self._forget(seq, int(self._running.state.committed[seq.slot]), len(seq.hashes))

    def _forget(self, seq: Sequence, first: int, last: int) -> None:
        for key in seq.hashes[first:last]:
            if self._computing.get(key) == seq.seq_id:
                del self._computing[key]
