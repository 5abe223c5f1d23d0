"""The simulator's policy of loops whose drafter rests while drafts do not pay: what the vLLM adapter runs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deepinfer_specdec.draft import Draft
from deepinfer_specdec.scheduling.admission import admit
from deepinfer_specdec.scheduling.cost import CostCurve
from deepinfer_specdec.scheduling.drafting import DraftingOptions, DraftingSwitch, drafting_gain
from deepinfer_specdec.scheduling.planner import VerificationPlanner
from deepinfer_specdec.simulation.throughput import Decision, Simulated


def paused(
    verify: CostCurve, draft: CostCurve, rows: int, width: int, options: DraftingOptions | None = None
) -> Simulated:
    """`planned`, and a `DraftingSwitch` before it. As in the adapter, a step's drafts are judged in the step after it, and what
    comes of that is the next but one's to do.
    """
    planner, slots, switch = VerificationPlanner(rows, width), np.arange(rows), DraftingSwitch(options)
    met, flying = np.zeros(rows, dtype=bool), np.zeros((0, width))
    plain, drafting = float(verify.seconds(rows)), float(draft.seconds(rows))
    seconds = verify.span(rows, rows * width + 1)

    def decide(step: int, block: Draft, replaced: NDArray[np.bool_]) -> Decision:
        nonlocal flying
        drafts = switch.wanted(rows, int(np.count_nonzero(~met)), plain)
        for slot in np.flatnonzero(replaced).tolist():
            planner.begin(slot, step)
        met[replaced] = False
        if flying.size:
            planner.record(step - 1, slots, flying)
            looked = slots[met]  # the others' blocks are those of requests that are gone
            if looked.size:
                prices = verify.span(looked.size, looked.size * width + 1)
                gain = drafting_gain(
                    planner.expected(step + 1, looked), looked.size, prices, float(draft.seconds(looked.size))
                )
                switch.judge(gain, plain)
        budget = planner.budget(step + 1, slots, seconds + drafting) if drafts else 0
        switch.passed(plain, drafting, rows if drafts else 0)
        flying = block.survivals() if drafts else flying[:0]
        met[:] |= drafts
        lengths = admit(block.survivals(), block.counts, budget) if drafts else np.zeros(rows, dtype=np.int32)
        return Decision(drafting * drafts, lengths)

    return decide
