"""Draws at places that only the device knows. What one row asks for costs the draws of such rows, not those of the others.

What a draw gives is what `Sampler` gives at its position, bit for bit. Nothing here waits for the device, unless its memory is
the host's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from deepinfer_offline.sampling.adjust import apply_masks, penalise
from deepinfer_offline.sampling.batch import SampledTokens
from deepinfer_offline.sampling.draw import draw_fused, ordered_limits, pick, scaled_weights, selects
from deepinfer_offline.sampling.logprobs import gather_logprobs
from deepinfer_offline.sampling.select import select_limits

if TYPE_CHECKING:
    from deepinfer_offline.sampling.device_rows import DeviceRows


@dataclass(frozen=True, slots=True)
class Some:
    """Some of n draws: m of them, those that ask first and in their order; the rest may be any others.

    Attributes:
        index: int64 [m], which; None for all in their order.
        rows: int64 [m], row of each.
    """

    index: torch.Tensor | None
    rows: torch.Tensor

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """Theirs of `values` [n, ...]; a copy unless they are all."""
        return values if self.index is None else values[self.index]

    def put(self, values: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
        """`values` [n, ...] with theirs [m, ...] in their places; changes `values`."""
        return theirs if self.index is None else values.index_copy_(0, self.index, theirs)


class RowDraws:
    """n draws of the rows of a step.

    Args:
        params: the rows.
        rows: int64 [n] on the device, row of each draw.
    """

    def __init__(self, params: DeviceRows, rows: torch.Tensor) -> None:
        self._params, self._rows = params, rows
        self._spare = len(rows) - len(params.slots)
        every = Some(None, rows)
        self._held, self._biased, self._penalised, self._random, self._reported = (
            self._some(feature, every) for feature in ("held", "biased", "penalised", "random", "logprobs")
        )

    def sample(
        self,
        logits: torch.Tensor,
        positions: torch.Tensor,
        mask_rows: np.ndarray | None = None,
        masks: np.ndarray | None = None,
    ) -> SampledTokens:
        """Draw.

        Args:
            logits: float32 [n, vocab]; changed.
            positions: int64 [n] on the device, index in its sequence of the token to draw.
            mask_rows, masks: grammar masks, as in `SamplingBatch`.

        Returns:
            int64 ids [n]; log-probabilities of the draws that ask for them, in the order of the draws, and behind them
            perhaps those of others.
        """
        some = self._reported
        if some is None:
            return SampledTokens(self.choose(logits, positions, mask_rows, masks))
        untouched = logits.clone() if some.index is None else some.take(logits)
        ids = self.choose(logits, positions, mask_rows, masks)
        places = np.arange(len(untouched))
        return SampledTokens(ids, gather_logprobs(untouched, some.take(ids), self._params.likeliest, places))

    def choose(
        self,
        logits: torch.Tensor,
        positions: torch.Tensor,
        mask_rows: np.ndarray | None = None,
        masks: np.ndarray | None = None,
    ) -> torch.Tensor:
        """The drawn ids alone, int64 [n]. Arguments as in `sample`."""
        logits = self._adjust(logits, positions, mask_rows, masks)
        some = self._random
        if some is None:
            return logits.argmax(dim=-1)
        drawn = self._draw(some, some.take(logits), some.take(positions))
        if some.index is None:
            return drawn
        ids = logits.argmax(dim=-1)
        return some.put(ids, torch.where(self._params.asked["random"][some.rows], drawn, some.take(ids)))

    def _some(self, feature: str, among: Some) -> Some | None:
        """The draws of `among` whose rows ask for something; None without any. `index` counts in `among`."""
        params, size = self._params, len(among.rows)
        if not params.asks[feature].any():
            return None
        if params.asks[feature].all():
            return Some(None, among.rows)
        asked = params.asked[feature][among.rows]
        if params.exact:
            index = asked.nonzero().squeeze(1)
        else:
            most = min(params.most_of(feature, self._spare), size)
            index = (~asked).to(torch.uint8).sort(stable=True).indices[:most]
        return Some(index, among.rows[index])

    def _adjust(
        self, logits: torch.Tensor, positions: torch.Tensor, mask_rows: np.ndarray | None, masks: np.ndarray | None
    ) -> torch.Tensor:
        """As `Sampler` does, in its order."""
        params = self._params
        if mask_rows is not None and masks is not None and len(mask_rows):
            apply_masks(logits, mask_rows, masks)
        if (some := self._held) is not None:
            theirs = some.take(logits)
            _hold_back(theirs, params.stop_ids[some.rows], some.take(positions) < params.min_len[some.rows])
            logits = some.put(logits, theirs)
        if (some := self._biased) is not None:
            place = some.take(torch.arange(len(logits), device=logits.device))[:, None]
            logits.index_put_((place, params.bias_ids[some.rows]), params.bias[some.rows], accumulate=True)
        if (some := self._penalised) is not None and params.penalties is not None:
            tokens = params.tokens[params.slots[some.rows], : params.width].long()
            theirs = penalise(some.take(logits), tokens, some.take(positions), params.penalties.take(some.rows))
            logits = some.put(logits, theirs)
        return logits

    def _draw(self, some: Some, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        params, rows = self._params, some.rows
        numbers, heat = params.numbers[rows, positions - params.lowest[rows]], params.heat[rows]
        fused = draw_fused(logits, heat, numbers, {name: column[rows] for name, column in params.columns.items()})
        return fused if fused is not None else pick(self._weights(some, logits, heat), numbers)

    def _weights(self, some: Some, logits: torch.Tensor, heat: torch.Tensor) -> torch.Tensor:
        """As `draw.filtered_weights`, by device columns. Only random rows ask for filters: theirs are among `some`."""
        params, weights = self._params, scaled_weights(logits, heat)
        if (few := self._some("min_p", some)) is not None:
            theirs = few.take(weights)
            floors = params.columns["min_p"][few.rows]
            weights = few.put(weights, theirs.masked_fill(theirs < floors[:, None], 0))
        if (few := self._some("limits", some)) is not None:
            theirs = few.take(weights)
            weights = few.put(weights, theirs.masked_fill(theirs < self._limits(theirs, few.rows), 0))
        return weights

    def _limits(self, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The smallest weight that each draw keeps, float32 [m, 1]."""
        columns, device = self._params.columns, weights.device
        top_k = columns["top_k"][rows] if "top_k" in columns else torch.zeros_like(rows)
        top_p = (columns["top_p"][rows] if "top_p" in columns else torch.ones(len(rows), device=device)).double()
        if selects(weights):  # on a CPU the device's numbers are the host's
            return torch.from_numpy(select_limits(weights.numpy(), top_k.numpy(), top_p.numpy()))[:, None]
        most = None if "top_p" in columns else int(self._params.filters["top_k"].max())
        return ordered_limits(weights, top_k, top_p, most)


def _hold_back(logits: torch.Tensor, ids: torch.Tensor, held: torch.Tensor) -> None:
    """Forbid int64 [n, k] stop ids in the rows bool [n], unless nothing else is allowed there."""
    kept = logits.gather(1, ids)
    logits.scatter_(1, ids, kept.masked_fill(held[:, None], -torch.inf))
    dead = logits.amax(dim=-1) == -torch.inf
    logits.scatter_(1, ids, kept.masked_fill((held & ~dead)[:, None], -torch.inf))
