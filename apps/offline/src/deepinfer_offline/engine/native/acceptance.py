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
    first = np.flatnonzero(np.diff(rows, prepend=-1))
    lengths = np.diff(first, append=size)
    column = np.arange(size) - np.repeat(first, lengths)
    owner, column_there, drafted, places, begins, drawing = upload(
        [
            np.repeat(np.arange(len(first)), lengths),
            column,
            column < plan.drafts[rows],
            tokens.flat_index(samples.slots, samples.positions),
            first,
            rows[first],
        ],
        drawn.device,
    )
    width = 1 + int(plan.drafts.max(initial=0))
    found = keep_agreeing(drawn, tokens, owner, column_there, drafted, places, begins, width)
    ids, counts = drawn.new_zeros(plan.num_rows, width), drawn.new_zeros(plan.num_rows)
    ids[drawing], counts[drawing] = found.token_ids, found.counts
    return Accepted(ids, counts)


def keep_agreeing(
    drawn: torch.Tensor,
    tokens: TokenBuffer,
    owner: torch.Tensor,
    column: torch.Tensor,
    drafted: torch.Tensor,
    places: torch.Tensor,
    begins: torch.Tensor,
    width: int,
) -> Accepted:
    """The same by device indices alone, for D rows that all draw.

    Args:
        drawn: int64 [n], row after row.
        tokens: see `accept_drafts`.
        owner: int64 [n], row of each draw.
        column: int64 [n], its place in the row.
        drafted: bool [n], a draft stands where it is drawn.
        places: int64 [n], where that is in the flattened token buffer.
        begins: int64 [D], first draw of each row.
        width: most draws of a row.
    """
    cells, rows = owner * width + column, len(begins)
    agree = drawn.new_zeros(rows * width)
    agree[cells] = ((tokens.gather(places) == drawn) & drafted).long()
    accepted = agree.view(-1, width).cumprod(1).sum(1)
    last = begins + accepted
    tokens.scatter(places[last], drawn[last])
    ids = drawn.new_zeros(rows * width)
    ids[cells] = drawn
    counts = accepted + 1
    inside = torch.arange(width, device=drawn.device) < counts[:, None]
    return Accepted(ids.view(-1, width) * inside, counts)
