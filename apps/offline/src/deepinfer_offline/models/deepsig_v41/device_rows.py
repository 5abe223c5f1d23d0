"""The token rows of one step on a CUDA device: every index is computed there, in shapes that the host knows beforehand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepinfer_offline.models.deepsig_v41.cache import GLOBAL, PAIRS, WINDOW
from deepinfer_offline.models.deepsig_v41.replay import Trim
from deepinfer_offline.models.deepsig_v41.stage import one_hot_pre
from deepinfer_offline.ops.transfers import upload

if TYPE_CHECKING:
    from deepinfer_offline.models.base import ForwardBatch, HostBatch


class Rotation(NamedTuple):
    """cos and sin, float32 [T, pairs]."""

    cos: Tensor
    sin: Tensor


class Constants:
    """Tensors that every step of a size reads, made once. Captured graphs hold their addresses: none is ever let go.

    Args:
        streams: of hyper-connections.
        device: of the tensors.
    """

    def __init__(self, streams: int, device: torch.device) -> None:
        self._streams, self._device = streams, device
        self._made: dict[int, tuple[Tensor, Tensor]] = {}

    def _of(self, count: int) -> tuple[Tensor, Tensor]:
        size = 1 << max(count - 1, 0).bit_length()
        if size not in self._made:
            numbers = torch.arange(size, dtype=torch.int32, device=self._device)
            self._made[size] = numbers, one_hot_pre(size, self._streams, self._device)
        return self._made[size]

    def numbers(self, count: int) -> Tensor:
        """int32 [count]: 0, 1, ..."""
        return self._of(count)[0][:count]

    def pre(self, count: int) -> Tensor:
        """float32 [count, streams]: 1 for the first stream, which is what the first site collapses."""
        return self._of(count)[1][:count]


class HostRows:
    """The host's view of a step, as `replay.plan_trim` wants it."""

    def __init__(self, host: HostBatch) -> None:
        self.query_starts = host.query_starts.astype(np.int64)
        counts = np.diff(self.query_starts)
        self.owner = np.repeat(np.arange(host.num_rows), counts)
        self.ends = host.seq_lens.astype(np.int64)
        self.host_positions = np.arange(len(self.owner)) - (self.query_starts[1:] - self.ends)[self.owner]
        self.floors = np.where(host.prefills, host.floors, 0).astype(np.int64)


@dataclass
class DeviceRows:
    """T token rows of R sequences. Tensors are on the device.

    Attributes:
        package: `deepinfer_kernels_cuda`.
        positions: int64 [T].
        owners: int32 [T], row of the block tables.
        floors: int32 [R], lowest position that window attention may read.
        write_floors: int32 [R].
        firsts: int32 [R], position of each sequence's first row.
        ends: int32 [R].
        tables: block tables by group, int32 [R, columns].
        longest: most positions of a sequence.
        block: tokens of a block.
        window: positions that a query reads.
        frequencies: rotary ones.
        constants: of the steps.
    """

    package: Any
    positions: Tensor
    owners: Tensor
    floors: Tensor
    write_floors: Tensor
    firsts: Tensor
    ends: Tensor
    tables: dict[str, Tensor]
    longest: int
    block: int
    window: int
    frequencies: Any
    constants: Constants
    _memo: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, batch: ForwardBatch, package: Any, frequencies: Any, constants: Constants, *, block: int, window: int
    ) -> DeviceRows:
        host, device = batch.host, batch.positions.device
        if host.num_decodes == host.num_rows:
            owners = constants.numbers(host.num_rows)
            firsts = batch.seq_lens - 1
        else:
            counts = host.counts
            owners, firsts = upload(
                [
                    np.repeat(np.arange(host.num_rows, dtype=np.int32), counts),
                    (host.seq_lens - counts).astype(np.int32),
                ],
                device,
            )
        return cls(
            package=package,
            positions=batch.positions,
            owners=owners,
            floors=batch.floors,
            write_floors=batch.write_floors,
            firsts=firsts,
            ends=batch.seq_lens,
            tables=dict(batch.block_tables),
            longest=int(host.seq_lens.max()),
            block=block,
            window=window,
            frequencies=frequencies,
            constants=constants,
        )

    def keep(self, trim: Trim) -> tuple[DeviceRows, Tensor]:
        """The rows that decoder replay keeps, with raised floors; and their places int64 [k] among these rows."""
        index, floors = upload([trim.kept, trim.floors.astype(np.int32)], self.positions.device)
        kept = DeviceRows(
            package=self.package,
            positions=self.positions[index],
            owners=self.owners[index],
            floors=floors,
            write_floors=self.write_floors,
            firsts=self.firsts,
            ends=self.ends,
            tables=self.tables,
            longest=self.longest,
            block=self.block,
            window=self.window,
            frequencies=self.frequencies,
            constants=self.constants,
        )
        return kept, index

    @property
    def count(self) -> int:
        return self.positions.shape[0]

    @property
    def window_slots(self) -> Tensor:
        """int64 [T], where each row's window KV goes."""
        return self._window().own

    @property
    def window_keys(self) -> Tensor:
        """int32 [T, window], the slots that each row reads, -1 where it may not."""
        return self._window().keys

    def rotary(self, ratio: int) -> Rotation:
        """Rotation of the rows' positions in a layer of this ratio."""
        return self._remember(("rotary", ratio > 0), lambda: self._rotation(ratio))

    def entry_rotary(self, ratio: int) -> Rotation:
        """Rotation of the first positions of the entries that the rows complete."""
        if ratio == 1:
            return self.rotary(1)
        return self._remember(("entry rotary", ratio), lambda: self._rotation(ratio, shift=ratio - 1))

    def entries(self, ratio: int) -> Any:
        """Slots of the entries that the rows complete, and how many each sees (`EntryIndex`)."""
        return self._remember(
            ("entries", ratio),
            lambda: self.package.entry_index(
                self.positions, self.owners, self.write_floors, self.tables[GLOBAL], ratio=ratio, block=self.block
            ),
        )

    def ring_blocks(self) -> Tensor:
        """int32 [R], each sequence's block in the ring pools."""
        return self._remember("ring", lambda: self.tables[PAIRS][:, 0].contiguous())

    def most_entries(self, ratio: int) -> int:
        """Entries of the longest sequence; at least one column, so that shapes are never empty."""
        return max(1, self.longest // ratio)

    def _window(self) -> Any:
        return self._remember(
            "window",
            lambda: self.package.window_index(
                self.positions, self.owners, self.floors, self.tables[WINDOW], window=self.window, block=self.block
            ),
        )

    def _rotation(self, ratio: int, shift: int = 0) -> Rotation:
        frequencies = self.frequencies.compressed if ratio else self.frequencies.plain
        return Rotation(*self.package.rotation(self.positions, frequencies, shift=shift))

    def _remember(self, key: Any, make: Any) -> Any:
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]
