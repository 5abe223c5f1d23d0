"""Where the rows of a step begin and how many drafts each verifies, on the device: no host knows it when the step is launched."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from deepinfer_sched import StepPlan

from deepinfer_offline.engine.native.batch import StepInputs
from deepinfer_offline.engine.native.tokens import TokenBuffer
from deepinfer_offline.models.base import ForwardBatch
from deepinfer_offline.ops.transfers import upload


@dataclass(frozen=True, slots=True)
class AheadState:
    """What steps leave of each slot for those that follow, on the device; one slot more is nobody's.

    Attributes:
        lengths: int64 [max_running + 1], its tokens.
        confidence: float32 [max_running + 1, K], raw, of its block.
    """

    lengths: torch.Tensor
    confidence: torch.Tensor

    @classmethod
    def of(cls, max_running: int, width: int, device: str) -> AheadState:
        """Of slots that nothing is known of, and blocks of `width` drafts."""
        lengths = torch.zeros(max_running + 1, dtype=torch.int64, device=device)
        return cls(lengths, torch.zeros(max_running + 1, width, device=device))


@dataclass(frozen=True, slots=True)
class DrawingRows:
    """The D rows of a step that draw: its decode rows, then the prompts that end in it. n draws, row after row.

    Attributes:
        plan_rows: int64 [D] on the host, rows of the plan.
        slots: int64 [D] on the host.
        lowest: int64 [D] on the host, the lowest position that a row may draw first.
        span: positions from there on at which a row may draw.
        most: int64 [D] on the host, most draws of each row.
        there: int64 [D], `plan_rows` on the device.
        base: int64 [D], where each row's slot begins in the flattened token buffer.
        first: int64 [D], position of each row's first draw.
        verified: int64 [D], drafts that the row verifies; it draws once more.
        begins: int64 [D], each row's first draw.
        owner: int64 [n], row of each draw.
        column: int64 [n], place of each draw in its row.
        width: most draws of a row.
    """

    plan_rows: np.ndarray
    slots: np.ndarray
    lowest: np.ndarray
    span: int
    most: np.ndarray
    there: torch.Tensor
    base: torch.Tensor
    first: torch.Tensor
    verified: torch.Tensor
    begins: torch.Tensor
    owner: torch.Tensor
    column: torch.Tensor
    width: int

    @property
    def positions(self) -> torch.Tensor:
        """int64 [n], index in its sequence of the token that each draw gives."""
        return self.first[self.owner] + self.column

    @property
    def places(self) -> torch.Tensor:
        """int64 [n], the same in the flattened token buffer."""
        return self.base[self.owner] + self.positions


def share_drafts(
    confidence: torch.Tensor, scaling: torch.Tensor, most: torch.Tensor, budget: int | torch.Tensor
) -> torch.Tensor:
    """How many drafts each row verifies, int64 [R]: the `budget` likeliest to survive, as `deepinfer_specdec.admit` has it.

    Equal survivals go to the earlier column, then to the lower row: nothing here depends on a drafted token at its own place.

    Args:
        confidence: float32 [R, K], raw, of the rows' blocks.
        scaling: float32 [2, K], the calibration: temperatures and offsets by column.
        most: int64 [R], drafts that each row may verify.
        budget: at most their sum; or int [1], the same where only the device knows it.
    """
    rows, width = confidence.shape
    given = most.new_zeros(rows)
    if isinstance(budget, int) and not budget:
        return given
    survival = torch.sigmoid(confidence / scaling[0] + scaling[1]).cumprod(dim=1)
    exists = torch.arange(width, device=most.device) < most[:, None]
    keys = torch.where(exists, survival, -1.0).t().flatten()  # by column, then by row: a stable order settles ties
    chosen = keys.sort(descending=True, stable=True).indices
    if isinstance(budget, int):
        chosen = chosen[:budget]
    counts = torch.arange(len(chosen), device=most.device) < budget
    return given.scatter_add_(0, chosen % rows, counts.to(most.dtype))


def lay_out(plan: StepPlan, state: AheadState, scaling: np.ndarray, tokens: TokenBuffer) -> DrawingRows:
    """Share the budget, and say where everything is.

    Args:
        plan: with `ahead`.
        state: as the steps before left it. Lengths that the host knows are put right.
        scaling: float32 [2, K], see `share_drafts`.
        tokens: the token buffer.
    """
    assert plan.ahead is not None
    count = plan.num_decodes
    ending = np.flatnonzero(plan.prefills & plan.samples)
    plan_rows = np.concatenate([np.arange(count), ending])
    slots, ends = plan.slots[plan_rows].astype(np.int64), (plan.starts + plan.counts)[plan_rows]
    known = np.where(plan.prefills[plan_rows], ends, plan.starts[plan_rows] + 1).astype(np.int64)
    slack, most = plan.slack[:count], plan.drafts[:count].astype(np.int64)
    span = int((slack + most).max(initial=0)) + 1 + plan.ahead.width
    there, slots_there, known_there, exact, most_there, heat = upload(
        [plan_rows, slots, known, slack == 0, most, scaling], state.lengths.device
    )
    decoding = slots_there[:count]
    first = known_there.clone()
    first[:count] = torch.where(exact, known_there[:count], state.lengths[decoding])
    verified = torch.zeros_like(known_there)
    verified[:count] = share_drafts(state.confidence[decoding], heat, most_there, plan.ahead.budget)
    draws = verified + 1
    ends_of_draws = draws.cumsum(0)
    number = torch.arange(len(plan_rows) + plan.ahead.budget, device=state.lengths.device)
    owner = torch.searchsorted(ends_of_draws, number, right=True)
    begins = ends_of_draws - draws
    return DrawingRows(
        plan_rows=plan_rows,
        slots=slots,
        lowest=known - np.concatenate([slack, np.zeros(len(ending), np.int64)]),
        span=span,
        most=1 + np.concatenate([most, np.zeros(len(ending), np.int64)]),
        there=there,
        base=slots_there * tokens.capacity,
        first=first,
        verified=verified,
        begins=begins,
        owner=owner,
        column=number - begins[owner],
        width=1 + int(most.max(initial=0)),
    )


def ahead_batch(
    plan: StepPlan, inputs: StepInputs, rows: DrawingRows, tokens: TokenBuffer, device: str, *, exact: bool
) -> ForwardBatch:
    """The batch of a step that is planned ahead: decode rows as they turned out, then prompts as they were planned.

    Args:
        plan, inputs, rows: of the step.
        tokens: holds the drafts where they are verified.
        device: of the model.
        exact: give the model the true lengths on the host too. Only where the device's memory is the host's.
    """
    assert plan.ahead is not None
    host, count = inputs.host, plan.num_decodes
    flat = count + plan.ahead.budget
    index, positions, starts, ends, slots, floors, write_floors, logit_rows, *tables = upload(
        [
            inputs.token_index[flat:],
            inputs.positions[flat:],
            host.query_starts[count:],
            host.seq_lens[count:],
            host.slots,
            host.floors,
            host.write_floors,
            host.logit_rows,
            *host.block_tables.values(),
        ],
        device,
    )
    begins = rows.begins[:count].int()
    lengths = (rows.first + rows.verified)[:count].int()
    query_starts, seq_lens = torch.cat((begins, starts)), torch.cat((lengths, ends))
    if exact:
        host = replace(host, query_starts=query_starts.numpy(), seq_lens=seq_lens.numpy())
    return ForwardBatch(
        token_ids=tokens.gather(torch.cat((rows.places[:flat] - 1, index))),
        positions=torch.cat((rows.positions[:flat] - 1, positions)),
        query_starts=query_starts,
        seq_lens=seq_lens,
        slots=slots,
        floors=floors,
        write_floors=write_floors,
        logit_rows=logit_rows,
        block_tables=dict(zip(host.block_tables, tables, strict=True)),
        cascades=(),
        tokens=tokens.data,
        host=host,
    )
