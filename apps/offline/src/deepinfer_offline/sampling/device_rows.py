"""The sequences that draw in a step whose places only the device knows: a verified row starts where the step before left off.

The host knows which sequences draw, how often at most, and between which positions. What belongs to a sequence is uploaded once
a step and gathered by row; the random numbers of all positions that may come up are uploaded, and each draw takes its own
position's.
"""

from __future__ import annotations

import numpy as np
import torch

from deepinfer_offline.ops.transfers import upload
from deepinfer_offline.sampling.adjust import Penalties
from deepinfer_offline.sampling.batch import SamplingTable
from deepinfer_offline.sampling.device_draws import RowDraws
from deepinfer_offline.sampling.draw import used_filters
from deepinfer_offline.sampling.random import uniform


class DeviceRows:
    """The sequences that draw in one step, and what each asks for. R rows.

    Args:
        table: parameters by slot; read here only.
        slots: int64 [R].
        lowest: int64 [R], the lowest position at which each row may draw.
        span: positions from there on at which it may.
        draws: int64 [R], most draws of each row; it has one at least.
        tokens: the token buffer, int32 [max_running, capacity] on the device.
        exact: the device's numbers may be read when a step runs, because its memory is the host's. Otherwise nothing waits
            for the device: work on some rows is done for as many draws as they may have.

    Attributes:
        asks: bool [R] by what a row may ask for: `held` (minimum length), `biased`, `penalised`, `random` (rather than
            greedy), `min_p`, `limits` (top_k or top_p), `logprobs`.
        likeliest: tokens to report beside the drawn one, where a row asks for log-probabilities.
    """

    def __init__(
        self,
        table: SamplingTable,
        slots: np.ndarray,
        lowest: np.ndarray,
        span: int,
        draws: np.ndarray,
        tokens: torch.Tensor,
        *,
        exact: bool = False,
    ) -> None:
        self.exact, self._most, self.tokens = exact, draws, tokens
        self.asks = asks = asks_of(table, slots, lowest)
        random, held, biased = asks["random"], asks["held"], asks["biased"]
        self.likeliest = int(table.logprobs[slots].max(initial=0))
        self.width = int(lowest[asks["penalised"]].max(initial=0)) + span  # positions that penalties may look at
        self.filters = used_filters(table, slots)
        numbers = np.zeros((len(slots), span))
        positions = lowest[random, None] + np.arange(span)
        numbers[random] = uniform(np.repeat(table.seed[slots[random]], span), positions.ravel()).reshape(-1, span)
        there = upload(
            [
                slots.astype(np.int64),
                lowest.astype(np.int64),
                numbers,
                np.where(random, table.temperature[slots], np.float32(1)),
                np.where(held, table.min_len[slots], 0),
                _padded(table.stop_ids, slots, held),
                _padded(table.bias_ids, slots, biased),
                _padded(table.bias_values, slots, biased, repeat=False),
                *asks.values(),
                *self.filters.values(),
            ],
            tokens.device,
        )
        self.slots, self.lowest, self.numbers, self.heat, self.min_len, self.stop_ids, self.bias_ids, self.bias = there[
            :8
        ]
        self.asked = dict(zip(asks, there[8:], strict=False))
        self.columns = dict(zip(self.filters, there[8 + len(asks) :], strict=True))
        self.penalties = Penalties.of(table, slots, tokens.device) if asks["penalised"].any() else None

    def draws(self, rows: torch.Tensor) -> RowDraws:
        """Draws of the rows int64 [n] on the device: each row once at least, and no more often than it may."""
        return RowDraws(self, rows)

    def most_of(self, feature: str, spare: int) -> int:
        """Draws that the rows which ask for something may have, if `spare` draws are not their rows' first."""
        asked = self.asks[feature]
        return int(asked.sum()) + min(int((self._most[asked] - 1).sum()), spare)


def asks_of(table: SamplingTable, slots: np.ndarray, lowest: np.ndarray) -> dict[str, np.ndarray]:
    """Which rows ask for what, see `DeviceRows.asks`; none where all take their likeliest tokens. Arguments as there."""
    random = table.temperature[slots] > 0
    stops = np.array([len(table.stop_ids[slot]) > 0 for slot in slots.tolist()], bool)
    return {
        "held": (lowest < table.min_len[slots]) & stops,
        "biased": table.biased[slots],
        "penalised": table.penalised[slots],
        "random": random,
        "min_p": random & (table.min_p[slots] > 0),
        "limits": random & ((table.top_k[slots] > 0) | (table.top_p[slots] < 1)),
        "logprobs": table.logprobs[slots] >= 0,
    }


def _padded(lists: list[np.ndarray], slots: np.ndarray, chosen: np.ndarray, *, repeat: bool = True) -> np.ndarray:
    """[R, k]: the lists of the chosen rows, filled up with their first elements, or with zeros; other rows are zeros."""
    rows = np.flatnonzero(chosen)
    wanted = [lists[slot] for slot in slots[rows].tolist()]
    found = np.zeros((len(slots), max(map(len, wanted), default=0)), lists[0].dtype)
    for row, values in zip(rows.tolist(), wanted, strict=True):
        found[row, : len(values)] = values
        if repeat and len(values):
            found[row, len(values) :] = values[0]
    return found
