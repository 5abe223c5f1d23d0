"""What one forward computes, as plain arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deepinfer_sched.ahead import Ahead


@dataclass(frozen=True, slots=True)
class Cascade:
    """Decode rows whose block tables start with the same blocks: attend that prefix once for all of them.

    Attributes:
        rows: int32 [k], rows of the plan, ascending.
        blocks: leading pages that all of them share (blocks, when the prefix groups have one block size).
        tokens: positions below this are the shared prefix.
    """

    rows: np.ndarray
    blocks: int
    tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: one row for each scheduled sequence, decode rows first. R rows, all arrays [R].

    A plan carries no token ids. Positions `starts[r] .. starts[r]+counts[r]-1` of slot `slots[r]` are computed; the ids
    are in the runner's buffer of that slot. A decode row may be planned while the step that samples its input id is
    still in flight.

    With `ahead` the host knows upper bounds only: of a decode row, `starts` is the highest position it may begin at (the
    lowest is `starts - slack`), `drafts` the most it may verify, and `counts` is 1 + `drafts`.

    Attributes:
        step: number of the step, from 1.
        seq_ids: int64, the sequence of each row.
        slots: int32.
        starts: int32, position of the first computed token.
        counts: int32, tokens computed: a chunk of a prompt, 1 to decode, 1 + drafts to verify.
        drafts: int32, draft tokens among them.
        samples: bool, a token is sampled after the last position (after each position of a verified row).
        prefills: bool, the row computes tokens that were known before it was admitted.
        constrained: bool, sampling needs a grammar mask.
        floors: int32, window floor: keys below it are treated as absent by window groups; 0 means none.
        write_floors: int32, entries of prefix groups that end below it are shared and must not be written.
        slack: int32, drafts in flight before this step: the row starts that much earlier if all of them are rejected.
        cascades: groups of decode rows that share a prefix.
        admitted: sequences that took a slot in this step (`Sequence.slot`): load their tokens into it.
        preempted: sequences that lost their slot while this step was planned.
        finished: sequences that ended since the plan before.
        ahead: drafts are made and shared out on the device; None when the host knows every draft.
    """

    step: int
    seq_ids: np.ndarray
    slots: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    drafts: np.ndarray
    samples: np.ndarray
    prefills: np.ndarray
    constrained: np.ndarray
    floors: np.ndarray
    write_floors: np.ndarray
    slack: np.ndarray
    cascades: tuple[Cascade, ...] = ()
    admitted: tuple[int, ...] = ()
    preempted: tuple[int, ...] = ()
    finished: tuple[int, ...] = ()
    ahead: Ahead | None = None

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return int(self.counts.sum()) - (int(self.drafts.sum()) - self.ahead.budget if self.ahead else 0)

    @property
    def num_decodes(self) -> int:
        """Rows `0 .. num_decodes-1` decode or verify; the others prefill."""
        return int(len(self.prefills) - self.prefills.sum())
