"""Expert parallelism over torch.distributed: tokens travel to the ranks that own their experts, and their sums come back.

Every rank owns a contiguous range of experts. A token is sent once to each rank that owns at least one of its experts, with its
ids and weights; none is dropped. Rows arrive ordered by (source rank, token), partial sums are added in the order of ranks: the
result does not depend on timing. Works with any backend that has `all_to_all_single` (NCCL on GPUs, gloo on CPUs).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from .checks import require, require_dims, require_dtype


@dataclass(frozen=True)
class DispatchHandle:
    """What `combine` needs to send sums back.

    Attributes:
        rows: int64 [n], the token of each row that this rank sent, ordered by destination.
        sent: Rows sent to each rank.
        received: Rows received from each rank.
        tokens: Tokens of this rank.
    """

    rows: torch.Tensor
    sent: list[int]
    received: list[int]
    tokens: int


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
        handle = DispatchHandle(rows, sent_list, received_list, x.shape[0])
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
        total = torch.zeros(handle.tokens, y.shape[1], dtype=torch.float32, device=y.device)
        begin = 0
        for count in handle.sent:
            # Rows of one rank name each token at most once, so a plain indexed addition has one order.
            rows = handle.rows[begin : begin + count]
            total[rows] += back[begin : begin + count].float()
            begin += count
        return total.to(y.dtype)

    def _exchange(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=self.group)
        return out
