"""Running sequences as arrays, so that a decode step costs a few array operations and no loop."""

from __future__ import annotations

import numpy as np

from deepinfer_sched.cache import Hit
from deepinfer_sched.sequence import Sequence
from deepinfer_sched.step import StepPlan


class SlotState:
    """One entry for each slot; an empty slot has `seq_ids` -1. `length + pending` tokens exist or are being sampled."""

    def __init__(self, max_running: int) -> None:
        self.seq_ids = np.full(max_running, -1, np.int64)
        self.computed = np.zeros(max_running, np.int32)  # positions whose KV is written or planned
        self.length = np.zeros(max_running, np.int32)  # tokens whose ids are known
        self.pending = np.zeros(max_running, np.int32)  # tokens that steps in flight will sample
        self.target = np.zeros(max_running, np.int32)  # tokens to prefill: what was known at admission
        self.limit = np.zeros(max_running, np.int32)  # tokens at which the sequence ends
        self.drafts = np.zeros(max_running, np.int32)
        self.verifying = np.zeros(max_running, bool)  # drafts in flight: the next position is not known yet
        self.constrained = np.zeros(max_running, bool)
        self.floors = np.zeros(max_running, np.int32)
        self.write_floors = np.zeros(max_running, np.int32)
        self.committed = np.zeros(max_running, np.int32)  # leading pages that are findable
        self.last_step = np.zeros(max_running, np.int64)  # the last step that has a row of the slot

    def open(self, slot: int, seq: Sequence, limit: int, hit: Hit) -> None:
        """Fill a slot at admission."""
        self.seq_ids[slot] = seq.seq_id
        self.computed[slot] = hit.start
        self.length[slot] = self.target[slot] = len(seq.tokens)
        self.pending[slot] = self.drafts[slot] = 0
        self.limit[slot] = limit
        self.verifying[slot] = False
        self.constrained[slot] = seq.constrained
        self.last_step[slot] = 0
        self.floors[slot], self.write_floors[slot] = hit.replay_start, hit.write_floor

    def close(self, slot: int) -> None:
        self.seq_ids[slot] = -1

    def launch(self, slots: np.ndarray, ends: np.ndarray, drafts: np.ndarray, samples: np.ndarray, step: int) -> None:
        """Rows up to `ends` are in flight with step `step`."""
        self.computed[slots] = ends
        self.pending[slots] += np.where(samples, drafts + 1, 0).astype(np.int32)
        self.verifying[slots] = drafts > 0
        self.last_step[slots] = step

    def take(self, plan: StepPlan, rows: np.ndarray, num_tokens: np.ndarray) -> None:
        """Tokens that the given rows (bool [R]) of a plan have sampled; rejected drafts are taken back."""
        slots, taken, drafts = plan.slots[rows], num_tokens[rows], plan.drafts[rows]
        self.length[slots] += taken.astype(np.int32)
        self.pending[slots] -= drafts + 1
        verified = drafts > 0
        if verified.any():
            checked = slots[verified]
            self.computed[checked] = (plan.starts[rows] + taken)[verified]
            self.verifying[checked] = False
            self.drafts[checked] = 0
