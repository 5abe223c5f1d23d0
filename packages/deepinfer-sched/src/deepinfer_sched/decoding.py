"""Which running sequences decode in a step, and how many drafts they may verify. Looks at numbers only and changes none."""

from __future__ import annotations

import numpy as np

from deepinfer_sched.cache import Cache
from deepinfer_sched.config import SchedConfig
from deepinfer_sched.slots import SlotState


def ready_slots(state: SlotState, slots: np.ndarray, config: SchedConfig, *, follow: bool) -> np.ndarray:
    """The slots whose sequences can decode now, in the given order.

    Args:
        state: numbers by slot.
        slots: int32, those of running sequences.
        config: limits and policies.
        follow: rows may start where drafts in flight will lead.
    """
    pending, computed = state.pending[slots], state.computed[slots]
    exist = state.length[slots] + pending
    ready = (computed >= state.target[slots]) & (exist > computed) & (exist < state.limit[slots])
    if not follow:
        ready &= (state.slack[slots] == 0) & ((state.drafts[slots] == 0) | (pending == 0))
    if not config.constrained_ahead:
        ready &= ~state.constrained[slots] | (pending == 0)
    return slots[ready]


def wanted_drafts(state: SlotState, slots: np.ndarray) -> np.ndarray:
    """int32 [R]: drafts that each row of these slots may verify without going past its sequence's last token."""
    room = state.limit[slots] - state.length[slots] - state.pending[slots] - 1
    return np.minimum(state.drafts[slots], room)


def rows_without_room(cache: Cache, slots: np.ndarray, ends: np.ndarray) -> list[int]:
    """Rows of these slots that need more pages for positions below `ends` [R] than they hold."""
    return np.flatnonzero(ends > cache.held_pages(slots) * cache.page_size).tolist()
