"""Decoder-side bounded replay: a prompt needs the decoder layers only for the last window of its rows. `v41-model` section 4.

Encoder-side replay needs nothing here: the cache manager starts the computation at the replay start, and the batch carries the
window floor and the write floor of every sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from deepinfer_offline.models.deepsig_v41.rows import StepRows

if TYPE_CHECKING:
    from deepinfer_offline.models.base import HostBatch

DecoderReplay = Literal["paper", "vllm", "off"]
DECODER_REPLAYS: tuple[DecoderReplay, ...] = ("paper", "vllm", "off")


@dataclass(frozen=True)
class Trim:
    """Which rows go on from the cut layer.

    Attributes:
        kept: int64 [k], rows of the step, ascending.
        floors: int64 [R], window floors of the kept rows.
    """

    kept: np.ndarray
    floors: np.ndarray


def plan_trim(step: StepRows, host: HostBatch, window: int) -> Trim | None:
    """The last `window` rows of each prompt chunk that is longer; None when nothing can be dropped.

    Decode and verification rows, and sequences that want the logits of every row, keep all of theirs. A chunk of at most
    `window` rows is not trimmed and keeps its floor: the rows before it are there, because the chunk before kept its tail.
    """
    counts = np.diff(step.query_starts)
    trimmed = host.prefills & ~host.keep_all & (counts > window)
    if not trimmed.any():
        return None
    lowest = np.where(trimmed, step.ends - window, 0)
    kept = np.flatnonzero(step.host_positions >= lowest[step.owner])
    return Trim(kept, np.maximum(step.floors, lowest))


def kept_rows(trim: Trim | None, rows: np.ndarray, count: int) -> np.ndarray:
    """Where `rows` of the step lie among the kept rows. Every one of them must have been kept."""
    if trim is None:
        return rows
    place = np.full(count, -1, dtype=np.int64)
    place[trim.kept] = np.arange(len(trim.kept))
    found = place[rows]
    assert (found >= 0).all(), f"rows {rows[found < 0].tolist()} are wanted, but decoder replay dropped them"
    return found
