"""Changes to logits before the draw: grammar masks, held back stop ids, bias, penalties. In place, all rows at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from deepinfer_offline.ops.cuda.support import kernels, supports
from deepinfer_offline.ops.transfers import upload
from deepinfer_offline.sampling.batch import SamplingBatch, SamplingTable


def apply_masks(logits: torch.Tensor, rows: np.ndarray, masks: np.ndarray) -> None:
    """Set forbidden tokens to -inf.

    Args:
        logits: float32 [n, vocab], changed.
        rows: int64 [m], rows that are constrained.
        masks: int32 [m, words], bit t % 32 of word t // 32 allows token t; tokens beyond the last word are forbidden.
    """
    vocab = logits.shape[-1]
    if logits.is_cuda and supports("apply_bitmask")(str(logits.device), logits.dtype) is None:
        short = max(0, -(-vocab // 32) - masks.shape[1])
        bits_there, rows_there = upload([np.pad(masks, ((0, 0), (0, short))), rows], logits.device)
        kernels().apply_bitmask(logits, bits_there, rows_there)
        return
    bits = np.unpackbits(np.ascontiguousarray(masks).view(np.uint8), axis=1, count=vocab, bitorder="little")
    forbidden = bits == 0  # bits past the last word are 0
    if logits.device.type == "cpu":  # row by row in place: half the time of taking the rows out and putting them back
        values = logits.numpy()
        for row, closed in zip(rows.tolist(), forbidden, strict=True):
            np.copyto(values[row], -np.inf, where=closed)
        return
    index = _to(rows, logits)
    logits[index] = logits[index].masked_fill(torch.from_numpy(forbidden).to(logits.device), -torch.inf)


def hold_back_stops(logits: torch.Tensor, rows: np.ndarray, slots: np.ndarray, table: SamplingTable) -> None:
    """Forbid the stop ids of rows that are below their minimum length (`min_tokens`), unless nothing else is allowed.

    A grammar that is complete allows only stop ids: it wins over `min_tokens`.
    """
    lists = [table.stop_ids[slots[row]] for row in rows]
    if not sum(map(len, lists)):
        return
    at, ids = _flatten(rows, lists, logits)
    kept = logits[at, ids]
    logits[at, ids] = -torch.inf
    dead = logits[at].amax(dim=-1) == -torch.inf
    logits[at, ids] = torch.where(dead, kept, -torch.inf)


def add_bias(logits: torch.Tensor, rows: np.ndarray, slots: np.ndarray, table: SamplingTable) -> None:
    """Add each row's `logit_bias`."""
    if not len(rows):
        return
    at, ids = _flatten(rows, [table.bias_ids[slots[row]] for row in rows], logits)
    values = np.concatenate([table.bias_values[slots[row]] for row in rows])
    logits[at, ids] += _to(values, logits)


def apply_penalties(logits: torch.Tensor, rows: np.ndarray, batch: SamplingBatch, table: SamplingTable) -> None:
    """Repetition penalty (tokens of prompt and answer), then frequency and presence penalty (tokens of the answer).

    Counts are taken from the token buffer every step, so nothing can go stale when a step is dropped, a sequence is
    preempted or drafts are rejected.
    """
    assert batch.tokens is not None
    slots = batch.slots[rows]
    ends = batch.positions[rows]
    index = _to(rows, logits)
    tokens = batch.tokens[_to(slots, logits), : int(ends.max())].long()
    penalties = Penalties.of(table, slots, logits.device)
    logits[index] = penalise(logits[index], tokens, _to(ends, logits), penalties)


@dataclass(frozen=True, slots=True)
class Penalties:
    """The penalties of n rows on the logits' device: `answers` int64 [n], where each answer begins; the rest float32 [n]."""

    answers: torch.Tensor
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor

    @classmethod
    def of(cls, table: SamplingTable, slots: np.ndarray, device: torch.device) -> Penalties:
        """Those of the sequences in these slots; neutral where they have none."""
        columns = (table.prompt_len, table.repetition, table.frequency, table.presence)
        return cls(*upload([column[slots] for column in columns], device))

    def take(self, rows: torch.Tensor) -> Penalties:
        """Those of int64 [m] rows."""
        return Penalties(self.answers[rows], self.repetition[rows], self.frequency[rows], self.presence[rows])


def penalise(logits: torch.Tensor, tokens: torch.Tensor, ends: torch.Tensor, penalties: Penalties) -> torch.Tensor:
    """Logits float32 [n, vocab] after penalties for int64 [n, width] tokens, of which the first `ends` int64 [n] count."""
    vocab = logits.shape[-1]
    place = torch.arange(tokens.shape[1], device=logits.device)
    before = place < ends[:, None]
    answered = before & (place >= penalties.answers[:, None])
    # Places that do not count repeat the row's first token: what is written there twice is the same.
    tokens = torch.where(before & (tokens >= 0) & (tokens < vocab), tokens, tokens[:, :1])
    counts = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
    count = counts.scatter_add_(1, tokens, answered.float()).gather(1, tokens)
    values = logits.gather(1, tokens)
    repetition = penalties.repetition[:, None]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values = values - count * penalties.frequency[:, None]
    values = values - (count > 0) * penalties.presence[:, None]
    return logits.scatter(1, tokens, values)


def _flatten(rows: np.ndarray, lists: list[np.ndarray], logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = np.fromiter(map(len, lists), np.int64, len(lists))
    return _to(np.repeat(rows, lengths), logits), _to(np.concatenate(lists), logits)


def _to(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return upload([array], like.device)[0]
