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
        self.drafts = np.zeros(max_running, np.int32)  # that the next row may verify
        self.slack = np.zeros(max_running, np.int32)  # drafts in flight: `computed` is that much lower without them
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
        self.pending[slot] = self.drafts[slot] = self.slack[slot] = 0
        self.limit[slot] = limit
        self.constrained[slot] = seq.constrained
        self.last_step[slot] = 0
        self.floors[slot], self.write_floors[slot] = hit.replay_start, hit.write_floor

    def close(self, slot: int) -> None:
        self.seq_ids[slot] = -1

    def launch(self, plan: StepPlan) -> None:
        """The rows of a plan are in flight. The drafts that they verify are used up; those that the step makes follow."""
        slots = plan.slots
        self.computed[slots] = plan.starts + plan.counts
        self.pending[slots] += np.where(plan.samples, plan.drafts + 1, 0).astype(np.int32)
        self.slack[slots] += plan.drafts
        self.drafts[slots] = np.where(plan.samples, plan.ahead.width if plan.ahead else 0, 0)
        self.last_step[slots] = plan.step

    def take(self, plan: StepPlan, rows: np.ndarray, num_tokens: np.ndarray) -> None:
        """Tokens that the given rows (bool [R]) of a plan have sampled; rejected drafts are taken back."""
        slots, taken, drafts = plan.slots[rows], num_tokens[rows], plan.drafts[rows]
        self.length[slots] += taken.astype(np.int32)
        self.pending[slots] -= drafts + 1
        verified = drafts > 0
        if verified.any():
            checked, rejected = slots[verified], (drafts + 1 - taken)[verified].astype(np.int32)
            self.computed[checked] -= rejected
            self.slack[checked] -= drafts[verified]
