"""Inputs of a step of the loop ahead that is captured as a whole: the host brings what it knows of the rows, and the step itself
shares its drafts out and finds where its rows begin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from deepinfer_sched import StepPlan

from deepinfer_offline.engine.native.ahead_rows import AheadState, share_drafts
from deepinfer_offline.engine.native.batch import StepInputs
from deepinfer_offline.engine.native.ragged import bounds, ragged_batch
from deepinfer_offline.engine.native.step_memory import StepMemory, aligned, padded
from deepinfer_offline.engine.native.tokens import TokenBuffer
from deepinfer_offline.models.base import ForwardBatch
from deepinfer_offline.sampling.batch import SamplingTable
from deepinfer_offline.sampling.captured_rows import CapturedRows
from deepinfer_offline.sampling.random import uniform

_ONE = int(np.float32(1).view(np.int32))
_BY_ROW = ("slots", "known", "exact", "most", "floors", "write_floors")


@dataclass(frozen=True, slots=True, order=True)
class WholeBucket:
    """Tokens of a step and its rows, each with those that pad; most tokens of a row; positions up to the longest row's last, 0
    for a step that drafts nothing; and nothing where all rows are greedy, else `random` and the filters that any row has.
    """

    tokens: int
    rows: int
    width: int
    longest: int
    draws: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WholeRows:
    """Where the rows of a step turned out to be. R rows, those that pad among them: each has position 0 of an idle slot.

    Attributes:
        slots: int64 [R].
        first: int64 [R], position of each row's first draw.
        verified: int64 [R], drafts of each.
        begins: int32 [R + 1], each row's first token; rows that pad may have none.
    """

    slots: torch.Tensor
    first: torch.Tensor
    verified: torch.Tensor
    begins: torch.Tensor


@dataclass(frozen=True, slots=True)
class WholeBuffers:
    """The part of the memory that one bucket uses.

    Attributes:
        bucket: what fits.
        memory: where it lies.
        fields: int32, parts of the memory by name: of rows `slots`, `known` position of the first draw, whether that is `exact`,
            `most` drafts, `floors`, `write_floors`; `budget` [1]; `scaling`, the bits of float32 [2 * K]; where rows are drawn
            at random also what `CapturedRows` has of them; `widths` [groups] and `given`, the tables.
        layout: int32 [groups, 2], where each table begins and its columns.
        tables: by cache group, [rows, columns].
        numbers: int64 [tokens], 0, 1, ...
        idle: a slot of nobody.
    """

    bucket: WholeBucket
    memory: StepMemory
    fields: Mapping[str, torch.Tensor]
    layout: torch.Tensor
    tables: Mapping[str, torch.Tensor]
    numbers: torch.Tensor
    idle: int

    @classmethod
    def of(cls, memory: StepMemory, bucket: WholeBucket, drafts: int, idle: int) -> WholeBuffers:
        """Views of the memory, for blocks of so many drafts."""
        rows, drawing = bucket.rows, {}
        if bucket.draws:
            drawing = dict.fromkeys(("lowest", "heat", *bucket.draws), rows) | {"numbers": 2 * rows * span(drafts)}
        by_row = dict.fromkeys(_BY_ROW, rows)
        sizes = by_row | {"budget": 1, "scaling": 2 * drafts} | drawing | {"widths": len(memory.groups)}
        at, fields = 0, {}
        for name, size in sizes.items():
            fields[name] = memory.packed[at : at + size]
            at += aligned(size)
        fields["given"] = memory.packed[at:]
        numbers = torch.arange(bucket.tokens, device=memory.packed.device)
        layout, tables = memory.layout(memory.limit), memory.views(bucket.rows, memory.limit)
        return cls(bucket, memory, fields, layout, tables, numbers, idle)

    def fill(self, plan: StepPlan, inputs: StepInputs, scaling: np.ndarray, table: SamplingTable) -> None:
        """Bring a step of decode rows alone; `scaling` as of `lay_out`."""
        assert plan.ahead is not None
        size, host = self.bucket.rows, inputs.host
        tables = [padded(host.block_tables[group.name], size, 0) for group in self.memory.groups]
        columns = [
            padded(plan.slots, size, self.idle),
            padded(plan.starts + 1, size, 1),
            padded(plan.slack == 0, size, 1),
            padded(plan.drafts, size, 0),
            padded(host.floors, size, 0),
            padded(host.write_floors, size, 0),
            np.array([plan.ahead.budget], np.int32),
            _bits(scaling.astype(np.float32)),
            *self._drawing(plan, table),
            np.array([table.shape[1] for table in tables], np.int32),
        ]
        self.memory.bring(columns, tables)

    def _drawing(self, plan: StepPlan, table: SamplingTable) -> list[np.ndarray]:
        """What rows that are drawn at random ask for, in the order of the fields."""
        if not self.bucket.draws:
            return []
        size, slots, lowest = self.bucket.rows, plan.slots, plan.starts + 1 - plan.slack
        random, width = table.temperature[slots] > 0, span((self.fields["scaling"].numel()) // 2)
        numbers = np.zeros((size, width))
        positions = lowest[random, None].astype(np.int64) + np.arange(width)
        drawn = uniform(np.repeat(table.seed[slots[random]], width), positions.ravel()).reshape(-1, width)
        numbers[np.flatnonzero(random)] = drawn
        heat = np.where(random, table.temperature[slots], np.float32(1))
        columns = [padded(lowest, size, 1), padded(_bits(heat), size, _ONE)]
        for name in self.bucket.draws:
            if name == "random":
                columns.append(padded(random, size, 0))
            elif name == "top_k":
                columns.append(padded(table.top_k[slots], size, 0))
            else:
                columns.append(padded(_bits(getattr(table, name)[slots]), size, _ONE if name == "top_p" else 0))
        return [*columns, _bits(numbers)]

    def drawing(self, vocab_size: int) -> CapturedRows | None:
        """What the rows ask for; None where all are greedy."""
        f = self.fields
        if not self.bucket.draws:
            return None
        columns = {}
        for name in self.bucket.draws[1:]:
            columns[name] = f[name].long() if name == "top_k" else f[name].view(torch.float32)
        numbers = f["numbers"].view(torch.float64).view(self.bucket.rows, -1)
        heat = f["heat"].view(torch.float32)
        return CapturedRows(f["lowest"].long(), numbers, heat, f["random"].bool(), columns, vocab_size)

    def lay_out(self, state: AheadState) -> WholeRows:
        """Share the budget, and say where everything is: `ahead_rows.lay_out` in shapes that stay."""
        f, b = self.fields, self.bucket
        slots, most = f["slots"].long(), f["most"].long()
        first = torch.where(f["exact"].bool(), f["known"].long(), state.lengths[slots])
        verified = torch.zeros_like(first)
        if b.width > 1 and b.rows == 1:
            verified = f["budget"].long()  # survivals never rise along a row
        elif b.width > 1:
            scaling = f["scaling"].view(torch.float32).view(2, -1)
            verified = share_drafts(state.confidence[slots], scaling, most, f["budget"])
        begins = torch.zeros(b.rows + 1, dtype=torch.int32, device=slots.device)
        begins[1:] = (verified + 1).cumsum(0).clamp_max(b.tokens)
        return WholeRows(slots, first, verified, begins)

    def batch(self, rows: WholeRows, tokens: TokenBuffer) -> ForwardBatch:
        """The step. Its tokens past the last row are position 0 of nobody."""
        b, seq_lens = self.bucket, (rows.first + rows.verified).int()
        starts, decodes = np.minimum(np.arange(b.rows + 1) * b.width, b.tokens), b.rows if b.width == 1 else 0
        host = bounds(starts, self.memory.limit, draws=b.tokens, decodes=decodes)
        return ragged_batch(
            self.memory, self.fields, self.tables, self.layout, tokens, host,
            size=b.tokens, starts=rows.begins, seq_lens=seq_lens, logit_rows=self.numbers,
        )  # fmt: skip


def span(drafts: int) -> int:
    """Positions at which a row may draw or draft, from the lowest on: two steps may lie between it and what the host knows, and
    it verifies a block and drafts another.
    """
    return 4 * drafts + 1


def _bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).reshape(-1).view(np.int32)
