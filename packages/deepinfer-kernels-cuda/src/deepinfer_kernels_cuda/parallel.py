"""Expert parallelism over torch.distributed: tokens travel to the ranks that own their experts, and their sums come back.

Every rank owns a contiguous range of experts. A token is sent once to each rank that owns at least one of its experts, with its
ids and weights; none is dropped. Rows arrive ordered by (source rank, token), partial sums are added in the order of ranks: the
result does not depend on timing. Works with any backend that has `all_to_all_single` (NCCL on GPUs, gloo on CPUs).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from .capability import interpreting
from .checks import require, require_dims, require_dtype
from .overlap import overlap


@dataclass(frozen=True)
class DispatchHandle:
    """What `combine` needs to send sums back.

    Attributes:
        places: int32 [t, ranks], where each token's row is among those that this rank sent; -1 where none went to a rank.
        sent: Rows sent to each rank.
        received: Rows received from each rank.
    """

    places: torch.Tensor
    sent: list[int]
    received: list[int]


@dataclass(frozen=True)
class Dispatched:
    """Rows that arrived: x [m, d], local expert ids int64 [m, k] (-1 where another rank owns it), weights float32 [m, k]."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    handle: DispatchHandle


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

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Dispatched:
        """Send tokens to the owners of their experts; a collective call.

        Args:
            x: [t, d]; t may differ by rank and may be 0.
            ids: int64 [t, k] expert ids, -1 = none.
            weights: float32 [t, k].
        """
        require_dims("x", x, 2)
        require_dtype("weights", weights, torch.float32)
        require(
            ids.shape == weights.shape and ids.shape[0] == x.shape[0],
            f"ids {tuple(ids.shape)} do not fit x {tuple(x.shape)}",
        )
        owner = torch.where(ids >= 0, ids // self.local, -1)
        ranks = torch.arange(self.size, device=ids.device)
        wanted = (owner[None] == ranks[:, None, None]).any(-1)  # [ranks, t]
        sent = wanted.sum(1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        sent_list, received_list = torch.stack((sent, received)).tolist()  # the only wait for the device
        destination, rows = torch.nonzero_static(wanted, size=sum(sent_list)).unbind(1)

        local_ids = ids[rows] - (destination * self.local)[:, None]
        owned = (owner[rows] == destination[:, None]) & (ids[rows] >= 0)
        local_ids = torch.where(owned, local_ids, -1)
        there = self._exchange(x[rows], sent_list, received_list)
        both = torch.cat((local_ids.int(), weights[rows].view(torch.int32)), 1)
        both_ids, both_weights = self._exchange(both, sent_list, received_list).chunk(2, 1)
        order = wanted.flatten().cumsum(0, dtype=torch.int32).view_as(wanted) - 1
        places = torch.where(wanted, order, -1).t().contiguous()
        handle = DispatchHandle(places, sent_list, received_list)
        return Dispatched(there, both_ids.long(), both_weights.contiguous().view(torch.float32), handle)

    def combine(self, y: torch.Tensor, handle: DispatchHandle) -> torch.Tensor:
        """Return the partial sums and add them, float32, in the order of ranks; a collective call.

        Args:
            y: [m, d], one row for each that arrived.
            handle: From `dispatch`.

        Returns:
            [t, d] in y's dtype; a token without any expert gets zeros.
        """
        require(y.shape[0] == sum(handle.received), f"y has {y.shape[0]} rows; {sum(handle.received)} arrived")
        back = self._exchange(y.contiguous(), handle.received, handle.sent)
        return sum_placed(back, handle.places)

    def _exchange(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=self.group)
        return out


def sum_placed(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """What came back, added for each token: float32 sums in the order of ranks, each rounded once.

    Args:
        rows: [n, d], contiguous.
        places: int32 [t, ranks], contiguous; -1 = none.

    Returns:
        [t, d] in the dtype of rows.
    """
    tokens, width = len(places), rows.shape[1]
    if not tokens or not len(rows):
        return rows.new_zeros(tokens, width)
    if rows.device.type != "cuda" and not interpreting():
        total = torch.zeros(tokens, width, device=rows.device)
        for place in places.t().long():
            total += torch.where((place >= 0)[:, None], rows[place.clamp(min=0)].float(), 0)
        return total.to(rows.dtype)
    from .kernels.parallel import sum_placed_kernel

    out = rows.new_empty(tokens, width)
    block = min(1024, 1 << (width - 1).bit_length())
    sum_placed_kernel[(tokens, -(-width // block))](
        rows, places, out, places.shape[1], width, BLOCK=block, num_warps=4, **overlap(rows.device)
    )
    return out
