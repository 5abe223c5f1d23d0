"""Which steps run the drafter's block, and which requests have a draft that may be verified."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deepinfer_specdec.adapters.vllm.options import VerificationOptions
from deepinfer_specdec.scheduling.drafting import DraftingOptions, DraftingSwitch


class Drafting:
    """Follows the drafts of every slot, and asks the switch before each step.

    vLLM schedules drafts for every request that decodes, whether its last step made some or not; what stands in their place
    must never be admitted. A slot holds a draft only if the last step that sampled for it drafted.

    Args:
        slots: requests that can run at once.
        options: what the user chose.
    """

    def __init__(self, slots: int, options: VerificationOptions) -> None:
        self._switch = DraftingSwitch(DraftingOptions(share=options.look_share))
        self._may_pause = options.pause_drafting
        self._edge = 1.0 + options.edge
        self._held = np.zeros(slots, dtype=bool)
        self._met = np.zeros(slots, dtype=bool)  # had a draft since their request began
        self.wanted = True  # whether the next step is to draft
        self.now = True  # whether the step in flight drafts, as vLLM decided
        self.steps = 0
        self.drafted = 0

    @property
    def changes(self) -> int:
        """How often drafting stopped or went on."""
        return self._switch.changes

    def begin(self, slot: int) -> None:
        """A new request takes the slot."""
        self._held[slot] = self._met[slot] = False

    def held(self, slots: NDArray[np.integer]) -> NDArray[np.bool_]:
        """bool [R], whether each of `slots` [R] has a draft that was made for its last token."""
        return self._held[slots]

    def met(self, slots: NDArray[np.integer]) -> NDArray[np.integer]:
        """Those of `slots` [R] whose request has had a draft."""
        return slots[self._met[slots]]

    def judge(self, gain: float, plain: float) -> None:
        """Drafts have come in: see `DraftingSwitch.judge`."""
        if self._may_pause:
            self._switch.judge(gain / self._edge, plain)

    def passed(
        self, batch: NDArray[np.integer], sampling: NDArray[np.integer], plain: float, drafting: float
    ) -> NDArray[np.integer]:
        """A step has passed; decides about the next one, which is taken to be like it.

        Args:
            batch: slots that ran.
            sampling: those of them that sampled a token.
            plain: milliseconds of the step without drafts.
            drafting: milliseconds that drafting for `sampling` adds.

        Returns:
            Slots whose confidences are on their way: `sampling`, or none.
        """
        self._held[batch] = False
        self.steps += 1
        drafted = sampling if self.now else sampling[:0]
        if self.now:
            self.drafted += 1
            self._held[drafted] = self._met[drafted] = True
        # Drafts that others wanted (ranks agree on them) are none of the switch's expenses.
        self._switch.passed(plain, drafting if self.wanted else 0.0, drafted.size)
        new = int(np.count_nonzero(~self._met[sampling]))
        self.wanted = self._switch.wanted(sampling.size, new, plain)
        return drafted
