"""Expert parallelism over torch.distributed: tokens travel to the ranks that own their experts, and their sums come back.

Every rank owns a contiguous range of experts. A token is sent once to each rank that owns at least one of its experts, with its
ids and weights; none is dropped. Rows arrive ordered by (source rank, token), partial sums are added in the order of ranks: the
result does not depend on timing. Works over NCCL on GPUs and gloo on CPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .checks import require, require_dims, require_dtype, require_inner, require_same_device
from .parallel_rows import HostCounts, Segments, Target, number_rows, send_rows, sum_rows


@dataclass(frozen=True)
class DispatchHandle:
    """What `combine` needs to send sums back.

    Attributes:
        places: int32 [t, ranks], the row of each token among those that this rank sent to a rank; -1 where it did not go there.
        counts: int32 [ranks] of `sent` on the device; None where every rank has `most` rows.
        sent: Rows sent to each rank.
        received: Rows received from each rank.
        most: Rows of every rank's part, absent ones included; None where only rows that exist travel.
    """

    places: torch.Tensor
    counts: torch.Tensor | None
    sent: list[int]
    received: list[int]
    most: int | None = None


@dataclass(frozen=True)
class Dispatched:
    """Rows that arrived: x [m, d], local expert ids int64 [m, k] (-1 where another rank owns it), weights float32 [m, k].

    Rows of x may lie further apart than d. With `most`, m is ranks * most whatever arrived; the ids of an absent row are all -1,
    its x is anything.
    """

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    handle: Any


def check_tokens(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, most: int | None) -> None:
    """Refuse what `dispatch` cannot send.

    Raises:
        ArgumentError: Shapes, dtypes, devices, or a graph that would have to read counts back.
    """
    require_same_device(x, ids, weights)
    require_dims("x", x, 2)
    require_inner("x", x)
    require_dims("ids", ids, 2)
    require_dtype("ids", ids, torch.int64)
    require_dtype("weights", weights, torch.float32)
    require(
        ids.shape == weights.shape and ids.shape[0] == x.shape[0],
        f"x {tuple(x.shape)}, ids {tuple(ids.shape)}, weights {tuple(weights.shape)}; allowed: [t, d], [t, k], [t, k]",
    )
    require(most is None or x.shape[0] <= most, f"x has {x.shape[0]} tokens; allowed: up to most, {most}")
    require(
        most is not None or not x.is_cuda or not torch.cuda.is_current_stream_capturing(),
        "a dispatch without most reads counts back, which no CUDA graph can hold; give most",
    )


class ExpertParallel:
    """Dispatch and combine for one group.

    Args:
        experts: Experts in all; divisible by the group's size.
        group: Process group; None is the default one.

    Raises:
        ArgumentError: Experts do not divide evenly.
    """

    def __init__(self, experts: int, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        require(experts % self.size == 0, f"{experts} experts do not divide among {self.size} ranks")
        self.local = experts // self.size
        self.first = self.rank * self.local
        self._host: HostCounts | None = None

    def dispatch(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, most: int | None = None
    ) -> Dispatched:
        """Send tokens to the owners of their experts; a collective call.

        Args:
            x: [t, d]; t may differ by rank and may be 0.
            ids: int64 [t, k] expert ids; -1, like any other number that no expert has, goes nowhere.
            weights: float32 [t, k].
            most: No rank has more tokens than this; the same on all. Then nothing is read back to the host, shapes depend on
                `most` alone, and a CUDA graph can hold the call: for decoding.

        Raises:
            ArgumentError: Shapes, dtypes, more tokens than `most`; on this rank alone, so the others wait for it.
        """
        check_tokens(x, ids, weights, most)
        ids, weights = ids.contiguous(), weights.contiguous()
        return self._compact(x, ids, weights) if most is None else self._padded(x, ids, weights, most)

    def _compact(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Dispatched:
        """Sizes first, then the rows, each with its ids and weights behind it; own rows are packed while the others travel."""
        (tokens, top_k), peers = ids.shape, self.size - 1
        counts = torch.empty(2, self.size, dtype=torch.int32, device=x.device)  # sent, received
        places = number_rows(ids, self.local, self.size, counts[0])
        dist.all_to_all_single(counts[1], counts[0], group=self.group)
        self._host = self._host or HostCounts((2, self.size), x.device)
        self._host.mark()
        leaving, packed = joined_rows(tokens * min(peers, top_k), x, top_k)
        me, segments = range(self.rank, self.rank + 1), Segments(counts=counts[0])
        send_rows(
            x, ids, weights, places, packed, segments, me=self.rank, local=self.local, to=range(self.size),
            without=self.rank,
        )  # fmt: skip
        sent, received = self._host.fetch(counts)  # the only wait for the device, while rows are packed
        arrived, rows = joined_rows(sum(received), x, top_k)
        travels = self._exchange(self._others(leaving, sent, packed=True), self._others(arrived, received), wait=False)
        mine = slice(sum(received[: self.rank]), sum(received[: self.rank + 1]))
        own = Target(rows.x[mine], rows.ids[mine], rows.weights[mine])
        send_rows(x, ids, weights, places, own, Segments(), me=self.rank, local=self.local, to=me)
        _wait(travels)
        handle = DispatchHandle(places, counts[0], sent, received)
        return Dispatched(rows.x, rows.ids.contiguous(), rows.weights.contiguous(), handle)

    def _others(self, rows: torch.Tensor, counts: list[int], *, packed: bool = False) -> list[torch.Tensor]:
        """The segments of all ranks; none for this one, which takes no room where they are `packed`."""
        parts, begin = [], 0
        for rank, count in enumerate(counts):
            mine = rank == self.rank
            parts.append(rows[begin : begin + (0 if mine else count)])
            begin += 0 if mine and packed else count
        return parts

    def _exchange(self, leaving: list[torch.Tensor], arriving: list[torch.Tensor], *, wait: bool = True) -> list[Any]:
        """Send one piece to each rank and receive one from each; without `wait`, what is returned must be waited for."""
        if self.size == 1:
            return []
        if leaving[0].is_cuda:
            work = dist.all_to_all(arriving, leaving, group=self.group, async_op=not wait)
            return [] if work is None else [work]
        pairs = [(dist.isend, piece, rank) for rank, piece in enumerate(leaving) if len(piece)]
        pairs += [(dist.irecv, piece, rank) for rank, piece in enumerate(arriving) if len(piece)]
        ops = [dist.P2POp(call, piece, group=self.group, group_peer=rank) for call, piece, rank in pairs]
        _wait(dist.batch_isend_irecv(ops) if ops else [])
        return []

    def _padded(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, most: int) -> Dispatched:
        """One exchange of parts of equal size; own rows are written among those that arrive at once."""
        rows, sizes = self.size * most, [most] * self.size
        both, packed = joined_rows(2 * rows, x, ids.shape[1])  # what leaves, what arrives
        places = torch.empty(len(x), self.size, dtype=torch.int32, device=x.device)
        send_rows(
            x, ids, weights, places, packed, Segments(apart=most, own=rows), me=self.rank, local=self.local,
            to=range(self.size), padded=most,
        )  # fmt: skip
        self._exchange(self._others(both[:rows], sizes), self._others(both[rows:], sizes))
        handle = DispatchHandle(places, None, sizes, sizes, most)
        return Dispatched(packed.x[rows:], packed.ids[rows:].contiguous(), packed.weights[rows:].contiguous(), handle)

    def combine(self, y: torch.Tensor, handle: DispatchHandle) -> torch.Tensor:
        """Return the partial sums and add them, float32, in the order of ranks; a collective call.

        Args:
            y: [m, d], one row for each that arrived.
            handle: From `dispatch`.

        Returns:
            [t, d] in y's dtype; a token without any expert gets zeros.

        Raises:
            ArgumentError: Another number of rows.
        """
        require_dims("y", y, 2)
        arrived, mine = sum(handle.received), sum(handle.received[: self.rank])
        require(y.shape[0] == arrived, f"y has {y.shape[0]} rows; {arrived} arrived")
        y = y.contiguous()
        padded = handle.most is not None
        back = y.new_empty(sum(handle.sent) - (0 if padded else handle.sent[self.rank]), y.shape[1])
        self._exchange(self._others(y, handle.received), self._others(back, handle.sent, packed=not padded))
        segments = Segments(apart=handle.most) if handle.most is not None else Segments(counts=handle.counts)
        return sum_rows(y, back, handle.places, segments, me=self.rank, here=mine)


def joined_rows(count: int, x: torch.Tensor, top_k: int) -> tuple[torch.Tensor, Target]:
    """Room for rows like those of x, ids and weights behind each: as bytes [count, b], and as what they are."""
    size = x.shape[1] * x.element_size()
    ids = -(-size // 8) * 8
    weights = ids + 8 * top_k
    length = -(-(weights + 4 * top_k) // 64) * 64  # kernels take strides of 64 bytes for aligned
    joined = torch.empty(count, length, dtype=torch.uint8, device=x.device)
    views = joined[:, :size].view(x.dtype), joined[:, ids:weights].view(torch.int64)
    return joined, Target(*views, joined[:, weights : weights + 4 * top_k].view(torch.float32))


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()
