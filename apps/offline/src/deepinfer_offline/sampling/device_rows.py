"""Drawing for rows whose place only the device knows: a verified row starts where the step before left off.

The host knows which sequences draw, and between which positions. What belongs to a sequence is uploaded once a step and
gathered by row; the random numbers of all positions that may come up are uploaded, and each draw takes its position's own.
What a draw gives is what `Sampler` gives at its position, bit for bit. Nothing here waits for the device.
"""

from __future__ import annotations

import numpy as np
import torch

from deepinfer_offline.ops.transfers import upload
from deepinfer_offline.sampling.adjust import Penalties, apply_masks, penalise
from deepinfer_offline.sampling.batch import Logprobs, SamplingTable
from deepinfer_offline.sampling.draw import draw_fused, ordered_limits, pick, scaled_weights, selects, used_filters
from deepinfer_offline.sampling.logprobs import gather_logprobs
from deepinfer_offline.sampling.random import uniform
from deepinfer_offline.sampling.select import select_limits


class DeviceRows:
    """The sequences that draw in one step. R rows.

    Args:
        table: parameters by slot; read here only.
        slots: int64 [R].
        lowest: int64 [R], the lowest position at which each row may draw.
        span: positions from there on at which it may.
        tokens: the token buffer, int32 [max_running, capacity] on the device.
    """

    def __init__(
        self, table: SamplingTable, slots: np.ndarray, lowest: np.ndarray, span: int, tokens: torch.Tensor
    ) -> None:
        device = tokens.device
        self._tokens, self._width = tokens, int(lowest.max(initial=0)) + span
        self._penalties = Penalties.of(table, slots, device) if table.penalised[slots].any() else None
        held = (lowest < table.min_len[slots]) & np.array([len(table.stop_ids[slot]) > 0 for slot in slots], bool)
        self._held = _padded(table.stop_ids, slots) if held.any() else None
        self._biased = _padded(table.bias_ids, slots) if table.biased[slots].any() else None
        self._bias = _padded(table.bias_values, slots, repeat=False) if table.biased[slots].any() else None
        self._wanted = table.logprobs[slots]
        random = table.temperature[slots] > 0
        self._all_random, self._any_random = bool(random.all()), bool(random.any())
        numbers = uniform(np.repeat(table.seed[slots], span), (lowest[:, None] + np.arange(span)).ravel())
        self._filters = used_filters(table, slots)
        there = upload(
            [
                slots.astype(np.int64),
                lowest.astype(np.int64),
                numbers.reshape(-1, span),
                random,
                np.where(random, table.temperature[slots], np.float32(1)),
                np.where(held, table.min_len[slots], 0),
            ],
            device,
        )
        self._slots, self._lowest, self._numbers, self._random, self._heat, self._min_len = there
        self._columns = dict(zip(self._filters, upload(list(self._filters.values()), device), strict=True))
        self._lists = [None if x is None else upload([x], device)[0] for x in (self._held, self._biased, self._bias)]

    @property
    def wants_logprobs(self) -> bool:
        """Whether any row asks for log-probabilities."""
        return bool((self._wanted >= 0).any())

    def choose(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        mask_rows: np.ndarray | None = None,
        masks: np.ndarray | None = None,
    ) -> torch.Tensor:
        """The drawn ids, int64 [n].

        Args:
            logits: float32 [n, vocab]. Changed unless a row asks for log-probabilities.
            rows: int64 [n] on the device, row of each draw.
            positions: int64 [n] on the device, index in its sequence of the token to draw.
            mask_rows, masks: grammar masks, as in `SamplingBatch`.
        """
        adjusted = self._adjust(logits, rows, positions, mask_rows, masks)
        if not self._any_random:
            return adjusted.argmax(dim=-1)
        drawn = self._draw(adjusted, rows, positions)
        return drawn if self._all_random else torch.where(self._random[rows], drawn, adjusted.argmax(dim=-1))

    def logprobs(self, logits: torch.Tensor, ids: torch.Tensor) -> Logprobs | None:
        """Log-probabilities of all n draws if any row asked, with as many likeliest tokens as the one that asked for most."""
        if not self.wants_logprobs:
            return None
        return gather_logprobs(logits, ids, int(self._wanted.max()), np.arange(len(ids)))

    def _adjust(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        mask_rows: np.ndarray | None,
        masks: np.ndarray | None,
    ) -> torch.Tensor:
        """As `Sampler` does, in its order."""
        held, biased, bias = self._lists
        if self.wants_logprobs:
            logits = logits.clone()
        if mask_rows is not None and masks is not None and len(mask_rows):
            apply_masks(logits, mask_rows, masks)
        if held is not None:
            _hold_back(logits, held[rows], positions < self._min_len[rows])
        if biased is not None and bias is not None:
            logits.scatter_add_(1, biased[rows], bias[rows])
        if self._penalties is not None:
            tokens = self._tokens[self._slots[rows], : self._width].long()
            logits = penalise(logits, tokens, positions, self._penalties.take(rows))
        return logits

    def _draw(self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        numbers = self._numbers[rows, positions - self._lowest[rows]]
        heat, columns = self._heat[rows], {name: column[rows] for name, column in self._columns.items()}
        fused = draw_fused(logits, heat, numbers, columns)
        return fused if fused is not None else pick(self._weights(logits, heat, columns), numbers)

    def _weights(self, logits: torch.Tensor, heat: torch.Tensor, columns: dict[str, torch.Tensor]) -> torch.Tensor:
        """As `draw.filtered_weights`, by device columns."""
        weights = scaled_weights(logits, heat)
        if "min_p" in columns:
            weights = weights.masked_fill(weights < columns["min_p"][:, None], 0)
        if "top_k" not in columns and "top_p" not in columns:
            return weights
        top_k = columns.get("top_k", torch.zeros(len(logits), dtype=torch.int64, device=logits.device))
        top_p = columns.get("top_p", torch.ones(len(logits), device=logits.device)).double()
        if selects(weights):  # on a CPU the device's numbers are the host's
            limits = torch.from_numpy(select_limits(weights.numpy(), top_k.numpy(), top_p.numpy()))[:, None]
        else:
            limits = ordered_limits(
                weights, top_k, top_p, None if "top_p" in columns else int(self._filters["top_k"].max())
            )
        return weights.masked_fill(weights < limits, 0)


def _hold_back(logits: torch.Tensor, ids: torch.Tensor, held: torch.Tensor) -> None:
    """Forbid int64 [n, k] stop ids in the rows bool [n], unless nothing else is allowed there."""
    kept = logits.gather(1, ids)
    logits.scatter_(1, ids, kept.masked_fill(held[:, None], -torch.inf))
    dead = logits.amax(dim=-1) == -torch.inf
    logits.scatter_(1, ids, kept.masked_fill((held & ~dead)[:, None], -torch.inf))


def _padded(lists: list[np.ndarray], slots: np.ndarray, *, repeat: bool = True) -> np.ndarray:
    """[R, k]: each slot's list, filled up with its first element, or with zeros; an empty one is zeros."""
    chosen = [lists[slot] for slot in slots.tolist()]
    found = np.zeros((len(chosen), max(map(len, chosen))), chosen[0].dtype)
    for row, values in enumerate(chosen):
        found[row, : len(values)] = values
        if repeat and len(values):
            found[row, len(values) :] = values[0]
    return found
