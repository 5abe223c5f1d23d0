"""Which drafts a step keeps: those that are the tokens it drew. All rows at once, on the device, without a wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from deepinfer_offline.ops.transfers import upload

if TYPE_CHECKING:
    from deepinfer_sched import StepPlan

    from deepinfer_offline.engine.native.batch import SampleRows
    from deepinfer_offline.engine.native.tokens import TokenBuffer


@dataclass(frozen=True, slots=True)
class Accepted:
    """What the rows of a step emit, on the device. R rows of the plan, K drafts at most.

    Attributes:
        token_ids: int64 [R, K + 1], left-aligned: accepted drafts, then the token drawn after them; 0 elsewhere.
        counts: int64 [R], how many of them count; 0 for rows that draw nothing.
    """

    token_ids: torch.Tensor
    counts: torch.Tensor


def accept_drafts(plan: StepPlan, samples: SampleRows, drawn: torch.Tensor, tokens: TokenBuffer) -> Accepted:
    """Keep each row's drafts up to the first that is not what was drawn there, and write that draw over it.

    Every position is drawn with its own random number from the target's own distribution, so this is coupled
    verification (`deepinfer_specdec.verification.reference`): greedy rows compare ids and never build a distribution.

    Args:
        plan: the step.
        samples: its draws; those of one row follow each other by position.
        drawn: int64 [n], on the device.
        tokens: holds the drafts at the positions of the draws; afterwards the last token that each row emits.
    """
    rows, size = samples.plan_rows, len(samples.plan_rows)
    width = 1 + int(plan.drafts.max(initial=0))
    first = np.flatnonzero(np.diff(rows, prepend=-1))
    column = np.arange(size) - np.repeat(first, np.diff(first, append=size))
    cells, places, drafted, first_draw, drawing = upload(
        [
            rows * width + column,
            tokens.flat_index(samples.slots, samples.positions),
            column < plan.drafts[rows],
            first,
            rows[first],
        ],
        drawn.device,
    )
    agree = drawn.new_zeros(plan.num_rows * width)
    agree[cells] = ((tokens.gather(places) == drawn) & drafted).long()
    accepted = agree.view(-1, width).cumprod(1).sum(1)[drawing]
    counts = drawn.new_zeros(plan.num_rows)
    counts[drawing] = accepted + 1
    ids = drawn.new_zeros(plan.num_rows * width)
    ids[cells] = drawn
    last = first_draw + accepted
    tokens.scatter(places[last], drawn[last])
    inside = torch.arange(width, device=drawn.device) < counts[:, None]
    return Accepted(ids.view(-1, width) * inside, counts)
