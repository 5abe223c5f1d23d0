"""Expert parallelism over torch.distributed: tokens travel to the ranks that own their experts, and their sums come back.

Every rank owns a contiguous range of experts. A token is sent once to each rank that owns at least one of its experts, with its
ids and weights; none is dropped. Rows arrive ordered by (source rank, token), partial sums are added in the order of ranks: the
result does not depend on timing. Works over NCCL on GPUs and gloo on CPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .checks import require, require_dims, require_dtype, require_inner
from .parallel_rows import Segments, Target, number_rows, send_rows, sum_rows


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

    With `most`, m is ranks * most whatever arrived; the ids of an absent row are all -1, its x is anything.
    """

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    handle: Any


def check_tokens(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, most: int | None) -> None:
    """Refuse what `dispatch` cannot send.

    Raises:
        ArgumentError: Shapes or dtypes.
    """
    require_dims("x", x, 2)
    require_inner("x", x)
    require_dims("ids", ids, 2)
    require_dtype("ids", ids, torch.int64)
    require_dtype("weights", weights, torch.float32)
    require(
        ids.shape == weights.shape and ids.shape[0] == x.shape[0],
        f"ids {tuple(ids.shape)} do not fit x {tuple(x.shape)}",
    )
    require(most is None or x.shape[0] <= most, f"x has {x.shape[0]} tokens; allowed: up to most, {most}")


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
        self._side: torch.cuda.Stream | None = None

    def dispatch(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, most: int | None = None
    ) -> Dispatched:
        """Send tokens to the owners of their experts; a collective call.

        Args:
            x: [t, d]; t may differ by rank and may be 0.
            ids: int64 [t, k] expert ids, -1 = none.
            weights: float32 [t, k].
            most: No rank has more tokens than this; the same on all. Then nothing is read back to the host, shapes depend on
                `most` alone, and a CUDA graph can hold the call: for decoding.
        """
        check_tokens(x, ids, weights, most)
        ids, weights = ids.contiguous(), weights.contiguous()
        return self._compact(x, ids, weights) if most is None else self._padded(x, ids, weights, most)

    def _compact(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Dispatched:
        (tokens, top_k), peers = ids.shape, self.size - 1
        counts = torch.empty(2, self.size, dtype=torch.int32, device=x.device)  # sent, received
        places = number_rows(ids, self.local, self.size, counts[0])
        asked = dist.all_to_all_single(counts[1], counts[0], group=self.group, async_op=True)
        known = self._read_back(counts, asked)
        leaving = _new_rows(tokens * min(peers, top_k), x, top_k)
        segments = Segments(counts=counts[0])
        send_rows(
            x, ids, weights, places, leaving.target, segments, me=self.rank, local=self.local, to=range(self.size),
            without=self.rank,
        )  # fmt: skip
        sent, received = known()  # the only wait for the device, while rows are packed
        arrived = _new_rows(sum(received), x, top_k)
        waits = [
            self._exchange(self._others(there, sent, packed=True), self._others(here, received))
            for there, here in ((leaving.told, arrived.told), (leaving.target.x, arrived.target.x))
        ]
        mine = slice(sum(received[: self.rank]), sum(received[: self.rank + 1]))
        target = arrived.target
        own = Target(target.x[mine], target.ids[mine], target.weights[mine])
        me = range(self.rank, self.rank + 1)
        send_rows(x, ids, weights, places, own, Segments(), me=self.rank, local=self.local, to=me)
        _wait(waits[0])
        ids, weights = target.ids.contiguous(), target.weights.contiguous()
        _wait(waits[1])
        return Dispatched(target.x, ids, weights, DispatchHandle(places, counts[0], sent, received))

    def _read_back(self, counts: torch.Tensor, ready: Any) -> Callable[[], list[list[int]]]:
        """Begin to fetch counts [2, ranks] once `ready`; what is returned waits for them and gives them as lists."""
        if counts.device.type != "cuda":
            ready.wait()
            return counts.tolist
        self._side = self._side or torch.cuda.Stream(counts.device)
        known = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
        done = torch.cuda.Event()
        with torch.cuda.stream(self._side):
            ready.wait()
            known.copy_(counts, non_blocking=True)
            done.record()

        def wait() -> list[list[int]]:
            done.synchronize()
            return known.tolist()

        return wait

    def _others(self, rows: torch.Tensor, counts: list[int], *, packed: bool = False) -> list[torch.Tensor]:
        """The segments of all ranks; none for this one, which takes no room where they are `packed`."""
        parts, begin = [], 0
        for rank, count in enumerate(counts):
            mine = rank == self.rank
            parts.append(rows[begin : begin + (0 if mine else count)])
            begin += 0 if mine and packed else count
        return parts

    def _exchange(self, leaving: list[torch.Tensor], arriving: list[torch.Tensor]) -> list[Any]:
        """Begin to send one piece to each rank and to receive one from each; what is returned must be waited for."""
        if self.size == 1:
            return []
        if leaving[0].is_cuda:
            work = dist.all_to_all(arriving, leaving, group=self.group, async_op=True)
            return [work]
        pairs = [(dist.isend, piece, rank) for rank, piece in enumerate(leaving) if len(piece)]
        pairs += [(dist.irecv, piece, rank) for rank, piece in enumerate(arriving) if len(piece)]
        ops = [dist.P2POp(call, piece, group=self.group, group_peer=rank) for call, piece, rank in pairs]
        return dist.batch_isend_irecv(ops) if ops else []

    def _padded(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, most: int) -> Dispatched:
        """One exchange of parts of equal size, each row with its ids and weights behind it."""
        leaving = _joined_rows(self.size * most, x, ids.shape[1])
        arrived = _joined_rows(self.size * most, x, ids.shape[1])
        places = torch.empty(len(x), self.size, dtype=torch.int32, device=x.device)
        send_rows(
            x, ids, weights, places, leaving.target, Segments(apart=most), me=self.rank, local=self.local,
            to=range(self.size), padded=most,
        )  # fmt: skip
        dist.all_to_all_single(arrived.told, leaving.told, group=self.group)
        there, rows = arrived.target, [most] * self.size
        handle = DispatchHandle(places, None, rows, rows, most)
        return Dispatched(there.x, there.ids.contiguous(), there.weights.contiguous(), handle)

    def combine(self, y: torch.Tensor, handle: DispatchHandle) -> torch.Tensor:
        """Return the partial sums and add them, float32, in the order of ranks; a collective call.

        Args:
            y: [m, d], one row for each that arrived.
            handle: From `dispatch`.

        Returns:
            [t, d] in y's dtype; a token without any expert gets zeros.
        """
        arrived, mine = sum(handle.received), sum(handle.received[: self.rank])
        require(y.shape[0] == arrived, f"y has {y.shape[0]} rows; {arrived} arrived")
        y = y.contiguous()
        if handle.most is not None:
            back = torch.empty_like(y)
            dist.all_to_all_single(back, y, group=self.group)
            return sum_rows(back, back, handle.places, Segments(apart=handle.most), me=-1, here=0)
        back = y.new_empty(sum(handle.sent) - handle.sent[self.rank], y.shape[1])
        _wait(self._exchange(self._others(y, handle.received), self._others(back, handle.sent, packed=True)))
        return sum_rows(y, back, handle.places, Segments(counts=handle.counts), me=self.rank, here=mine)


@dataclass(frozen=True)
class _Rows:
    """Buffers of rows, and the one that holds ids and weights (of joined rows: everything)."""

    target: Target
    told: torch.Tensor


def _told_bytes(top_k: int) -> int:
    """Ids of 8 bytes and weights of 4, filled up to 8."""
    return 8 * top_k + 4 * (top_k + top_k % 2)


def _views(told: torch.Tensor, begin: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights in rows of bytes, from byte `begin`."""
    middle = begin + 8 * top_k
    return told[:, begin:middle].view(torch.int64), told[:, middle : middle + 4 * top_k].view(torch.float32)


def _new_rows(count: int, x: torch.Tensor, top_k: int) -> _Rows:
    """Rows like those of x, with ids and weights apart."""
    told = torch.empty(count, _told_bytes(top_k), dtype=torch.uint8, device=x.device)
    return _Rows(Target(x.new_empty(count, x.shape[1]), *_views(told, 0, top_k)), told)


def _joined_rows(count: int, x: torch.Tensor, top_k: int) -> _Rows:
    """Rows like those of x with ids and weights behind each; 64 bytes, since blocks see strides that are 16 words as such."""
    size = x.shape[1] * x.element_size()
    begin = -(-size // 8) * 8
    length = -(-(begin + _told_bytes(top_k)) // 64) * 64
    joined = torch.empty(count, length, dtype=torch.uint8, device=x.device)
    return _Rows(Target(joined[:, :size].view(x.dtype), *_views(joined, begin, top_k)), joined)


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()
