"""From a step plan to the arrays of one forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from deepinfer_sched import StepPlan

from deepinfer_offline.engine.native.tokens import TokenBuffer
from deepinfer_offline.models.base import BatchCascade, CacheGroup, ForwardBatch, HostBatch
from deepinfer_offline.ops.transfers import upload

TableSource = Callable[[str], np.ndarray]
"""`CacheManager.block_table`: group name -> int32 [max_running, columns], indexed by slot."""


@dataclass(frozen=True, slots=True)
class SampleRows:
    """The tokens that a step draws, in the order of the logits. n draws.

    Attributes:
        plan_rows: int64 [n], row of the plan.
        slots: int64 [n].
        positions: int64 [n], index in its sequence of the token to draw.
        logits: int64 [n], place among `HostBatch.logit_rows`.
    """

    plan_rows: np.ndarray
    slots: np.ndarray
    positions: np.ndarray
    logits: np.ndarray


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Prompt positions of one slot whose successor's log-probability is wanted.

    Attributes:
        slot: the sequence.
        first: position of the first one.
        logits: int64 [m], places among `HostBatch.logit_rows`, consecutive positions.
        top: likeliest tokens to report.
    """

    slot: int
    first: int
    logits: np.ndarray
    top: int


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Everything of a step that is known on the host before its token ids are.

    Attributes:
        host: the batch.
        positions: int64 [T].
        token_index: int64 [T], where the input ids are in the flattened token buffer.
        cascades: over batch rows.
        samples: what is drawn.
        prompts: prompt positions to report.
    """

    host: HostBatch
    positions: np.ndarray
    token_index: np.ndarray
    cascades: tuple[BatchCascade, ...]
    samples: SampleRows
    prompts: tuple[PromptRows, ...]


def plan_inputs(
    plan: StepPlan,
    groups: Sequence[CacheGroup],
    tables: TableSource,
    tokens: TokenBuffer,
    prompt_logprobs: Mapping[int, tuple[int, int]],
) -> StepInputs:
    """Lay out a plan as one batch: rows of one token first, then the others, each in plan order.

    A plan with `ahead` keeps its order. Its decode rows come first and are laid out as if the drafts were shared out in one
    certain way: their places are put right on the device (`ahead_rows`), sizes and upper bounds hold.

    Args:
        plan: what to compute.
        groups: cache groups of the model.
        tables: live block tables; the rows that are needed are copied.
        tokens: the token buffer (for its shape only).
        prompt_logprobs: slot -> (prompt length, likeliest tokens to report) of sequences that want them.
    """
    if plan.ahead is None and not plan.prefills.any() and (plan.counts == 1).all() and plan.samples.all():
        return _decode_inputs(plan, groups, tables, tokens)
    counts = plan.counts if plan.ahead is None else _counts_ahead(plan, plan.ahead.budget)
    order = np.argsort(counts != 1, kind="stable") if plan.ahead is None else np.arange(plan.num_rows)
    starts, counts, slots = plan.starts[order], counts[order], plan.slots[order]
    query_starts = np.zeros(len(order) + 1, np.int32)
    np.cumsum(counts, out=query_starts[1:])
    rows = np.repeat(np.arange(len(order)), counts)
    positions = np.arange(len(rows)) - query_starts[rows] + starts[rows]
    keep_all = np.array([slot in prompt_logprobs for slot in slots.tolist()], bool) & plan.prefills[order]
    drafts = counts - (plan.counts - plan.drafts)[order]
    wanted = np.where(plan.samples[order], drafts + 1, 0)
    logit_rows = _logit_rows(query_starts, np.where(keep_all, counts, wanted))
    seq_lens = (plan.starts + plan.counts)[order].astype(np.int32)
    host = HostBatch(
        query_starts=query_starts,
        seq_lens=seq_lens,
        slots=slots,
        prefills=plan.prefills[order],
        floors=plan.floors[order],
        write_floors=plan.write_floors[order],
        keep_all=keep_all,
        logit_rows=logit_rows,
        block_tables={group.name: _table_rows(tables(group.name), group, slots, seq_lens) for group in groups},
        num_decodes=int((counts == 1).sum()) if plan.ahead is None else 0,
    )
    return StepInputs(
        host=host,
        positions=positions,
        token_index=tokens.flat_index(slots[rows], positions),
        cascades=_batch_cascades(plan, order) if plan.ahead is None else (),
        samples=_sample_rows(order, host, wanted, positions),
        prompts=_prompt_rows(host, positions, prompt_logprobs),
    )


def _decode_inputs(
    plan: StepPlan, groups: Sequence[CacheGroup], tables: TableSource, tokens: TokenBuffer
) -> StepInputs:
    """`plan_inputs` of rows that compute one token each and draw the next: nothing has to be ordered or cut."""
    rows = np.arange(plan.num_rows)
    positions, seq_lens = plan.starts.astype(np.int64), plan.starts + 1
    host = HostBatch(
        query_starts=np.arange(plan.num_rows + 1, dtype=np.int32),
        seq_lens=seq_lens,
        slots=plan.slots,
        prefills=plan.prefills,
        floors=plan.floors,
        write_floors=plan.write_floors,
        keep_all=np.zeros(plan.num_rows, bool),
        logit_rows=rows,
        block_tables={group.name: _table_rows(tables(group.name), group, plan.slots, seq_lens) for group in groups},
        num_decodes=plan.num_rows,
    )
    return StepInputs(
        host=host,
        positions=positions,
        token_index=tokens.flat_index(plan.slots, positions),
        cascades=_batch_cascades(plan, rows),
        samples=SampleRows(rows, plan.slots.astype(np.int64), positions + 1, rows),
        prompts=(),
    )


def device_batch(inputs: StepInputs, tokens: TokenBuffer, device: str) -> ForwardBatch:
    """Put the inputs on the device and read the token ids, which the step before may just have written."""
    host = inputs.host
    token_index, positions, query_starts, seq_lens, slots, floors, write_floors, logit_rows, *tables = upload(
        [
            inputs.token_index,
            inputs.positions,
            host.query_starts,
            host.seq_lens,
            host.slots,
            host.floors,
            host.write_floors,
            host.logit_rows,
            *host.block_tables.values(),
        ],
        device,
    )
    return ForwardBatch(
        token_ids=tokens.gather(token_index),
        positions=positions,
        query_starts=query_starts,
        seq_lens=seq_lens,
        slots=slots,
        floors=floors,
        write_floors=write_floors,
        logit_rows=logit_rows,
        block_tables=dict(zip(host.block_tables, tables, strict=True)),
        cascades=inputs.cascades,
        tokens=tokens.data,
        host=host,
    )


def _counts_ahead(plan: StepPlan, budget: int) -> np.ndarray:
    """int32 [R], tokens of each row if those that may verify most are served first: no sharing makes a longer row."""
    order = np.argsort(-plan.drafts, kind="stable")
    most = plan.drafts[order]
    counts = plan.counts - plan.drafts
    counts[order] += np.clip(budget - (np.cumsum(most) - most), 0, most).astype(np.int32)
    return counts


def _logit_rows(query_starts: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Flattened token rows: the last `wanted[r]` tokens of each row r."""
    ends = query_starts[1:].astype(np.int64)
    before = np.cumsum(wanted) - wanted
    return np.repeat(ends - wanted - before, wanted) + np.arange(int(wanted.sum()))


def _table_rows(table: np.ndarray, group: CacheGroup, slots: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
    columns = 1 if group.kind == "state" else -(-int(seq_lens.max(initial=1)) // group.block_size)
    return table[slots, :columns]


def _batch_cascades(plan: StepPlan, order: np.ndarray) -> tuple[BatchCascade, ...]:
    place = np.empty(len(order), np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    found = []
    for cascade in plan.cascades:
        rows = cascade.rows[plan.counts[cascade.rows] == 1]  # a row that verifies drafts attends alone
        if len(rows) > 1:
            found.append(BatchCascade(np.sort(place[rows]), cascade.tokens))
    return tuple(found)


def _sample_rows(order: np.ndarray, host: HostBatch, wanted: np.ndarray, positions: np.ndarray) -> SampleRows:
    rows = np.repeat(np.arange(len(order)), wanted)
    offset = np.arange(len(rows)) - np.repeat(np.cumsum(wanted) - wanted, wanted)
    flat = host.query_starts[rows + 1] - wanted[rows] + offset
    return SampleRows(
        plan_rows=order[rows],
        slots=host.slots[rows].astype(np.int64),
        positions=positions[flat].astype(np.int64) + 1,
        logits=np.searchsorted(host.logit_rows, flat),
    )


def _prompt_rows(
    host: HostBatch, positions: np.ndarray, wanted: Mapping[int, tuple[int, int]]
) -> tuple[PromptRows, ...]:
    found = []
    for row in np.flatnonzero(host.keep_all).tolist():
        slot = int(host.slots[row])
        prompt_len, top = wanted[slot]
        first, last = int(host.query_starts[row]), int(host.query_starts[row + 1])
        flat = np.arange(first, last)
        flat = flat[positions[flat] < prompt_len - 1]  # the last prompt token predicts the first generated one
        if len(flat):
            found.append(PromptRows(slot, int(positions[flat[0]]), np.searchsorted(host.logit_rows, flat), top))
    return tuple(found)
