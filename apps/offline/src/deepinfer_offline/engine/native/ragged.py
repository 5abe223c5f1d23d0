"""A captured step whose rows have any number of tokens, as the model takes it: tensors that stay where they are, and bounds."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from deepinfer_offline.engine.native.step_memory import StepMemory
from deepinfer_offline.engine.native.tokens import TokenBuffer
from deepinfer_offline.models.base import ForwardBatch, HostBatch
from deepinfer_offline.ops.cuda.support import kernels


def ragged_batch(
    memory: StepMemory,
    fields: Mapping[str, torch.Tensor],
    tables: Mapping[str, torch.Tensor],
    layout: torch.Tensor,
    tokens: TokenBuffer,
    host: HostBatch,
    *,
    size: int,
    starts: torch.Tensor,
    seq_lens: torch.Tensor,
    logit_rows: torch.Tensor,
) -> ForwardBatch:
    """The step. Its tokens past the last row are position 0 of nobody.

    Args:
        memory: holds the inputs.
        fields: int32, parts of it by name: of R rows `slots`, `floors`, `write_floors`; `widths` and `given`, the tables.
        tables: by cache group, [R, columns], where the step reads them.
        layout: int32 [groups, 2], where each table begins and its columns.
        tokens: the token buffer.
        host: see `bounds`.
        size: tokens of the step.
        starts: int32 [R + 1], where rows begin.
        seq_lens: int32 [R].
        logit_rows: int64 [n].
    """
    token_ids, positions = kernels().ragged_inputs(
        starts, seq_lens, fields["slots"], tokens.flat, fields["widths"], fields["given"], layout, memory.tables,
        tokens=size, capacity=tokens.capacity, scratch=tokens.scratch,
    )  # fmt: skip
    return ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        query_starts=starts,
        seq_lens=seq_lens,
        slots=fields["slots"],
        floors=fields["floors"],
        write_floors=fields["write_floors"],
        logit_rows=logit_rows,
        block_tables=tables,
        cascades=(),
        tokens=tokens.data,
        host=host,
    )


def bounds(starts: np.ndarray, limit: int, *, draws: int, decodes: int, prompts: int = 0) -> HostBatch:
    """The host's side of a captured step: shapes and upper bounds, no tables.

    Args:
        starts: [R + 1], where rows begin if each has as many tokens as it may have.
        limit: positions of a sequence at most.
        draws: hidden states that leave the model.
        decodes: rows, the first ones, of one token.
        prompts: rows, the last ones, that compute prompts.
    """
    rows = len(starts) - 1
    nothing = np.zeros(rows, np.int32)
    return HostBatch(
        query_starts=starts.astype(np.int32),
        seq_lens=np.full(rows, limit, np.int32),
        slots=nothing,
        prefills=np.arange(rows) >= rows - prompts,
        floors=nothing,
        write_floors=nothing,
        keep_all=np.zeros(rows, bool),
        logit_rows=np.arange(draws),
        block_tables={},
        num_decodes=decodes,
    )
