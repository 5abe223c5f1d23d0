"""The sequences that draw in a captured step: what each asks for lies where it stays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deepinfer_offline.sampling.device_draws import RowDraws

_YES, _NO = np.ones(1, bool), np.zeros(1, bool)


@dataclass(frozen=True, slots=True)
class CapturedRows:
    """As `DeviceRows`, for rows that are greedy or draw at random with filters, and ask for nothing else. R rows.

    All rows are drawn for as random ones with filters, which change nothing where a row has none; then greedy ones take their
    likeliest token.

    Attributes:
        lowest: int64 [R], the lowest position at which each row may draw.
        numbers: float64 [R, span], random numbers of the positions from there on.
        heat: float32 [R], temperatures; any of a greedy row.
        random: bool [R], which are not greedy.
        columns: [R] each, the filters that any row has, by name as in `DeviceRows`.
        vocab_size: width of the logits.
    """

    lowest: torch.Tensor
    numbers: torch.Tensor
    heat: torch.Tensor
    random: torch.Tensor
    columns: Mapping[str, torch.Tensor]
    vocab_size: int

    exact = False
    penalties = None

    def draw(self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """int64 [n], the tokens of draws of `rows` int64 [n] at `positions` int64 [n], from logits float32 [n, vocab]."""
        params: Any = self
        drawn = RowDraws(params, rows).choose(logits, positions)
        return torch.where(self.random[rows], drawn, logits.argmax(dim=-1))

    @property
    def slots(self) -> torch.Tensor:
        """As many as rows."""
        return self.lowest

    @property
    def asks(self) -> dict[str, np.ndarray]:
        """What all rows ask for, or none."""
        limits = "top_k" in self.columns or "top_p" in self.columns
        asked = {"random": True, "min_p": "min_p" in self.columns, "limits": limits}
        names = ("held", "biased", "penalised", "random", "min_p", "limits", "logprobs")
        return {name: _YES if asked.get(name) else _NO for name in names}

    @property
    def filters(self) -> dict[str, np.ndarray]:
        """Upper bounds of the columns."""
        return {"top_k": np.array([self.vocab_size])}
