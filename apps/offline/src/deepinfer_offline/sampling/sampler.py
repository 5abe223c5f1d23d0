"""From logits to tokens, all rows at once."""

from __future__ import annotations

import numpy as np
import torch

from deepinfer_offline.ops.transfers import upload
from deepinfer_offline.sampling.adjust import add_bias, apply_masks, apply_penalties, hold_back_stops
from deepinfer_offline.sampling.batch import SampledTokens, SamplingBatch, SamplingTable
from deepinfer_offline.sampling.draw import draw
from deepinfer_offline.sampling.logprobs import gather_logprobs


class Sampler:
    """Draws one token a row.

    Order of the steps, as in vLLM: log-probabilities of the untouched logits; grammar masks; held back stop ids; bias;
    penalties; greedy rows take the maximum; temperature; min_p; top_k; top_p; draw.

    What a row draws depends on its own logits, parameters, earlier tokens, seed and position only.

    Args:
        table: parameters of the running sequences.
    """

    def __init__(self, table: SamplingTable) -> None:
        self.table = table

    def __call__(self, logits: torch.Tensor, batch: SamplingBatch) -> SampledTokens:
        """Draw.

        Args:
            logits: float32 [n, vocab]; changed.
            batch: the rows.

        Returns:
            int64 ids [n], and log-probabilities of the rows that asked for them.
        """
        wanted = self.table.logprobs[batch.slots]
        rows = np.flatnonzero(wanted >= 0)
        if not len(rows):
            return SampledTokens(self.choose(logits, batch))
        (index,) = upload([rows], logits.device)
        untouched = logits[index]
        ids = self.choose(logits, batch)
        return SampledTokens(ids, gather_logprobs(untouched, ids[index], int(wanted.max()), rows))

    def choose(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """The drawn ids alone, int64 [n]. Arguments as in a call."""
        table, slots = self.table, batch.slots
        adjusted = self._adjust(logits, batch)
        random = np.flatnonzero(table.temperature[slots] > 0)
        if len(random) == len(slots):
            return draw(adjusted, table, slots, batch.positions)
        known = batch.likeliest if adjusted is logits else None
        ids = known if known is not None else adjusted.argmax(dim=-1)
        if not len(random):
            return ids
        (rows,) = upload([random], logits.device)
        return ids.index_copy(0, rows, draw(adjusted[rows], table, slots[random], batch.positions[random]))

    def _adjust(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """Logits after everything that can change the likeliest token; the same tensor object if nothing does."""
        table, slots = self.table, batch.slots
        held = np.flatnonzero(batch.positions < table.min_len[slots])
        biased = np.flatnonzero(table.biased[slots])
        penalised = np.flatnonzero(table.penalised[slots])
        masked = batch.mask_rows is not None and len(batch.mask_rows) > 0
        if not (masked or len(held) or len(biased) or len(penalised)):
            return logits
        adjusted = logits.view(logits.shape)
        if masked:
            assert batch.mask_rows is not None
            assert batch.masks is not None, "mask rows without masks"
            apply_masks(adjusted, batch.mask_rows, batch.masks)
        hold_back_stops(adjusted, held, slots, table)
        add_bias(adjusted, biased, slots, table)
        if len(penalised):
            assert batch.tokens is not None, "penalties need the tokens before"
            apply_penalties(adjusted, penalised, batch, table)
        return adjusted
