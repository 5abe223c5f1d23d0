"""The sequences that can have drafts, with what speculation asks of them in arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from deepinfer_sched.slots import SlotState

    from deepinfer_offline.engine.native.answer import Answer


@dataclass(frozen=True, slots=True)
class RunningRows:
    """R sequences past their prompts.

    Attributes:
        answers: R of them.
        slots: int64 [R].
        seq_ids: int64 [R].
        lengths: int32 [R], tokens that are known.
        left: int32 [R], tokens that each may still emit.
        constrained: bool [R], whether a grammar binds it.
    """

    answers: Sequence[Answer]
    slots: np.ndarray
    seq_ids: np.ndarray
    lengths: np.ndarray
    left: np.ndarray
    constrained: np.ndarray

    def __len__(self) -> int:
        return len(self.answers)

    def limits(self, most: int) -> np.ndarray:
        """int32 [R], drafts that each may have: the token that follows them ends it at the latest."""
        return np.clip(self.left - 1, 0, most)

    def some(self, places: Sequence[int]) -> RunningRows:
        """The rows at these places, in their order."""
        arrays = (self.slots, self.seq_ids, self.lengths, self.left, self.constrained)
        return RunningRows([self.answers[place] for place in places], *(array[places] for array in arrays))


def running_rows(state: SlotState, answers: Mapping[int, Answer], *, ready: bool) -> RunningRows:
    """The sequences past their prompts that still have an answer, by slot; `ready` ones wait for no token in flight."""
    chosen = (state.seq_ids >= 0) & (state.computed >= state.target)
    if ready:
        chosen &= state.pending == 0
    slots = np.flatnonzero(chosen)
    found = [answers.get(seq_id) for seq_id in state.seq_ids[slots].tolist()]
    kept = [answer for answer in found if answer is not None]
    if len(kept) < len(found):
        slots = slots[[answer is not None for answer in found]]
    lengths = state.length[slots]
    left = state.limit[slots] - lengths
    return RunningRows(kept, slots, state.seq_ids[slots], lengths, left, state.constrained[slots])
