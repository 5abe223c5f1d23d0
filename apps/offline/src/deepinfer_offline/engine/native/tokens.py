"""The token buffer: ids of every running sequence, on the device, by slot and position."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from deepinfer_offline.ops.transfers import upload


class TokenBuffer:
    """Prompt and generated ids. A step reads its input ids here and writes what it samples, so that the next step can
    be launched before those ids reach the host.

    Attributes:
        data: int32 [max_running, capacity] on the device.
        flat: int32 [max_running * capacity + 1], the same memory and one place more.
        scratch: that place; rows that pad a batch read and write there.
    """

    def __init__(self, max_running: int, capacity: int, device: str) -> None:
        self.capacity = capacity
        self.scratch = max_running * capacity
        self.flat = torch.zeros(self.scratch + 1, dtype=torch.int32, device=device)
        self.data = self.flat[: self.scratch].view(max_running, capacity)

    @staticmethod
    def num_bytes(max_running: int, capacity: int) -> int:
        """What such a buffer takes."""
        return torch.int32.itemsize * (max_running * capacity + 1)

    def write(self, slot: int, position: int, token_ids: Sequence[int] | np.ndarray) -> None:
        """Put ids at `position` and after. Raises ValueError if they do not fit."""
        self.write_rows([(slot, position, np.asarray(token_ids, np.int32))])

    def write_rows(self, rows: Sequence[tuple[int, int, np.ndarray]]) -> None:
        """The same for several slots (slot, position, ids int32) with one copy. Raises ValueError if any does not fit."""
        for _, position, ids in rows:
            if position < 0 or position + len(ids) > self.capacity:
                raise ValueError(
                    f"{len(ids)} ids at position {position} do not fit a buffer of {self.capacity} positions"
                )
        if not rows:
            return
        places = [slot * self.capacity + position + np.arange(len(ids)) for slot, position, ids in rows]
        index, ids = upload([np.concatenate(places), np.concatenate([ids for _, _, ids in rows])], self.data.device)
        self.flat[index] = ids

    def flat_index(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """int64 index into the flattened buffer."""
        return slots.astype(np.int64) * self.capacity + positions

    def gather(self, index: torch.Tensor) -> torch.Tensor:
        """Ids at int64 [n] flat indices, as int64."""
        return self.flat[index].long()

    def scatter(self, index: torch.Tensor, ids: torch.Tensor) -> None:
        """Write int64 ids [n] at int64 [n] flat indices."""
        self.flat[index] = ids.to(torch.int32)
