"""Expert parallelism between GPUs of one host: kernels write rows straight into the memory of the rank that they go to.

The contract of `ExpertParallel`, in memory that torch's symmetric memory maps into every rank: no copy, no library between. What
a dispatch gives lies in that memory, and may be overwritten from its combine on.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .capability import device_arch
from .checks import require, require_dtype, require_same_device
from .errors import UnsupportedDeviceError
from .overlap import overlap
from .parallel import Dispatched, check_tokens
from .parallel_rows import HostCounts, Segments, Target, number_rows, send_rows, sum_rows, words

#: Of torch: two processes may share one GPU's memory. Their kernels take turns there, by milliseconds.
_OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_BLOCK = 1024


@dataclass(frozen=True)
class PeerHandle:
    """What `combine` needs: places int32 [t, ranks], rows received (None: `most` of each rank), and which dispatch it was."""

    places: torch.Tensor
    received: list[int] | None
    most: int | None
    turn: int


def peer_reason(device: torch.device, group: dist.ProcessGroup | None = None) -> str | None:
    """Why the ranks of a group cannot write into each other's memory, or None; a collective call, the same answer for all."""
    mine: tuple[Any, ...] = (socket.gethostname(), _BOOT.read_text() if _BOOT.exists() else "", *_device(device))
    all_of = [mine] * dist.get_world_size(group)
    dist.all_gather_object(all_of, mine, group=group)
    if len({one[:2] for one in all_of}) > 1:
        return f"ranks are on several hosts: {', '.join(sorted({one[0] for one in all_of}))}"
    reasons = [f"rank {rank}: {one[3]}" for rank, one in enumerate(all_of) if one[3]]
    blocked = _blocked(device, [one[2] for one in all_of]) if not reasons else None
    found: list[Any] = [None] * len(all_of)
    dist.all_gather_object(found, blocked, group=group)
    return next((reason for reason in (*reasons, *found) if reason), None)


def _device(device: torch.device) -> tuple[str, str | None]:
    """The device's identity, and why it cannot take part."""
    if device_arch(device) not in (90, 100):
        return "", f"{device} is no CUDA device of compute capability 9.0 or 10.0"
    try:
        import torch.distributed._symmetric_memory
    except ImportError as failure:
        return "", f"torch has no symmetric memory: {failure}"
    return str(torch.cuda.get_device_properties(device).uuid), None


def _blocked(device: torch.device, identities: list[str]) -> str | None:
    """Why a device that is visible here cannot be reached from `device`, or None."""
    if len(set(identities)) < len(identities) and os.environ.get(_OVERLAPPING) != "1":
        return f"several ranks use one GPU, which torch allows for tests only ({_OVERLAPPING}=1)"
    here = device.index if device.index is not None else torch.cuda.current_device()
    for index in range(torch.cuda.device_count()):
        other = str(torch.cuda.get_device_properties(index).uuid)
        if index != here and other in identities and not torch.cuda.can_device_access_peer(here, index):
            return f"{device} cannot reach the memory of cuda:{index}"
    return None


class PeerParallel:
    """Dispatch and combine for a group whose GPUs reach each other's memory.

    Calls of all objects of one group go to one stream: they may share the signals by which ranks meet.

    Args:
        experts: Experts in all; divisible by the group's size.
        max_tokens: Most tokens of a rank in one call; memory for twice that many rows of every rank is held.
        hidden: Channels of a token; a row's bytes divide by 16.
        top_k: Experts of a token.
        device: This rank's GPU.
        group: Process group; None is the default one.
        dtype: Of rows.

    Raises:
        UnsupportedDeviceError: Memory cannot be shared, with the reason.
        ArgumentError: Sizes below 1; experts do not divide evenly, or rows do not.
    """

    def __init__(
        self, experts: int, *, max_tokens: int, hidden: int, top_k: int, device: torch.device,
        group: dist.ProcessGroup | None = None, dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        self.group = group if group is not None else dist.group.WORLD
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        require(experts % self.size == 0, f"{experts} experts do not divide among {self.size} ranks")
        require(
            min(max_tokens, hidden, top_k) >= 1,
            f"max_tokens {max_tokens}, hidden {hidden}, top_k {top_k}; allowed: 1 and more",
        )
        require(hidden * dtype.itemsize % 16 == 0, f"a row of {hidden} {dtype} has no multiple of 16 bytes")
        reason = peer_reason(device, group)
        if reason is not None:
            raise UnsupportedDeviceError(reason)
        self.local = experts // self.size
        self.first = self.rank * self.local
        self.max_tokens, self.top_k, self.dtype = max_tokens, top_k, dtype
        self._allocate(hidden, device)
        self._host = HostCounts((self.size, self.size), device)
        self._turn, self._last = 0, ""

    def _allocate(self, hidden: int, device: torch.device) -> None:
        """Counts, ids, weights, rows and what comes back, one behind the other, at the same places in every rank's memory."""
        from torch.distributed import _symmetric_memory

        rows = self.size * self.max_tokens
        parts = [
            ((self.size, self.size), torch.int32), ((rows, self.top_k), torch.int64), ((rows, self.top_k), torch.float32),
            ((rows, hidden), self.dtype), ((rows, hidden), self.dtype),
        ]  # fmt: skip
        sizes = [-(-shape[0] * shape[1] * dtype.itemsize // 256) * 256 for shape, dtype in parts]
        self._memory = _symmetric_memory.empty(sum(sizes), dtype=torch.uint8, device=device)
        self._peers = _symmetric_memory.rendezvous(self._memory, self.group)
        views = [
            piece[: shape[0] * shape[1] * dtype.itemsize].view(dtype).view(shape)
            for (shape, dtype), piece in zip(parts, self._memory.split(sizes), strict=True)
        ]
        self._counts, self._ids, self._weights, self._x, self._back = views
        # A block of torch's pool may hold other tensors too: where ours begins in it need not be the same on all ranks.
        mine, begins = self._memory.data_ptr(), [0] * self.size
        dist.all_gather_object(begins, mine - self._peers.buffer_ptrs[self.rank], group=self.group)
        delta = [block + begin - mine for block, begin in zip(self._peers.buffer_ptrs, begins, strict=True)]
        self._delta = torch.tensor(delta, dtype=torch.int64, device=device)
        self._target = Target(self._x, self._ids, self._weights, self._delta)

    def _inside(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() == self._memory.untyped_storage().data_ptr()

    def _meet(self) -> None:
        """What every rank enqueued before is done, and visible, before anything that is enqueued after."""
        self._peers.barrier(channel=0)

    def _begin(self, call: str) -> None:
        """Nobody may still read what this call overwrites: after the other call everybody has met, after the same one not yet."""
        if self._last == call:
            self._meet()
        self._last = call

    def dispatch(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, most: int | None = None
    ) -> Dispatched:
        """As `ExpertParallel.dispatch`. What it gives is read, not written: combine reads the ids again.

        A graph that holds a dispatch holds its combine too, and is replayed between a combine and the next dispatch.

        Raises:
            ArgumentError: More tokens, other dtypes, widths or devices than this object was made for.
        """
        check_tokens(x, ids, weights, most)
        require_same_device(x, self._memory)
        require_dtype("x", x, self.dtype)
        tokens = x.shape[0] if most is None else most
        require(tokens <= self.max_tokens, f"{tokens} tokens; allowed: up to max_tokens, {self.max_tokens}")
        require(x.shape[1] == self._x.shape[1], f"x has {x.shape[1]} channels; allowed: {self._x.shape[1]}")
        require(ids.shape[1] == self.top_k, f"ids has {ids.shape[1]} columns; allowed: {self.top_k}")
        for name, tensor in (("x", x), ("ids", ids), ("weights", weights)):
            require(not self._inside(tensor), f"{name} lies in the memory that peers write; clone it")
        ids, weights = ids.contiguous(), weights.contiguous()
        self._turn += 1
        return self._compact(x, ids, weights) if most is None else self._padded(x, ids, weights, most)

    def _compact(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Dispatched:
        self._begin("dispatch")
        places = number_rows(ids, self.local, self.size, self._counts[self.rank], self._delta)
        self._meet()
        self._host.mark()
        segments = Segments(counts=self._counts)
        send_rows(x, ids, weights, places, self._target, segments, me=self.rank, local=self.local, to=range(self.size))
        self._meet()
        received = [counts[self.rank] for counts in self._host.fetch(self._counts)]
        return self._dispatched(sum(received), PeerHandle(places, received, None, self._turn))

    def _padded(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, most: int) -> Dispatched:
        self._begin("dispatch")
        places = torch.empty(len(x), self.size, dtype=torch.int32, device=x.device)
        send_rows(
            x, ids, weights, places, self._target, Segments(first=self.rank * most), me=self.rank, local=self.local,
            to=range(self.size), padded=most,
        )  # fmt: skip
        self._meet()
        return self._dispatched(self.size * most, PeerHandle(places, None, most, self._turn))

    def _dispatched(self, rows: int, handle: PeerHandle) -> Dispatched:
        return Dispatched(self._x[:rows], self._ids[:rows], self._weights[:rows], handle)

    def combine(self, y: torch.Tensor, handle: PeerHandle) -> torch.Tensor:
        """As `ExpertParallel.combine`, for the dispatch before.

        Raises:
            ArgumentError: Other shapes or dtypes, or the handle of an earlier dispatch.
        """
        require(handle.turn == self._turn, f"handle of dispatch {handle.turn}; the last was {self._turn}")
        most, received = handle.most, handle.received
        rows = self.size * most if received is None else sum(received)
        shape = (rows, self._x.shape[1])
        require(y.shape == shape, f"y has shape {tuple(y.shape)}; allowed: {shape}")
        require_dtype("y", y, self.dtype)
        require_same_device(y, self._memory)
        # Own rows are read when peers may already send what is next.
        y = y.clone(memory_format=torch.contiguous_format) if self._inside(y) else y.contiguous()
        self._begin("combine")
        return_rows(
            y, self._ids, self._counts, self._back, self._delta, me=self.rank, capacity=self.max_tokens, most=most
        )
        self._meet()
        here = self.rank * most if received is None else sum(received[: self.rank])
        return sum_rows(y, self._back, handle.places, Segments(apart=self.max_tokens), me=self.rank, here=here)


def return_rows(
    y: torch.Tensor, ids: torch.Tensor, counts: torch.Tensor, back: torch.Tensor, delta: torch.Tensor, *, me: int,
    capacity: int, most: int | None,
) -> None:  # fmt: skip
    """Write each row of y to the rank that it came from; own ones stay.

    Args:
        y: [m, d], contiguous.
        ids: int64 [m or more, k]; with `most`, rows without any id stay.
        counts: int32 [ranks, ranks], rows from a source to a destination; read without `most`.
        back: [ranks * capacity, d]: at rank r, what rank s returns begins at s * capacity.
        delta: As in `Target`.
        me: This rank.
        capacity: Rows of a segment of `back`.
        most: Rows of each source in y; None: as `counts` has them.
    """
    from .kernels.parallel import return_rows_kernel

    if not len(y):
        return
    rows, there = words(y), words(back)
    width, ranks, top_k = rows.shape[1], len(delta), ids.shape[1]
    return_rows_kernel[(len(rows), -(-width // _BLOCK))](
        rows, ids, counts, there, delta, width, rows.stride(0), ranks, me, capacity, most or 1, K=top_k,
        BK=1 << (top_k - 1).bit_length(), BR=1 << (ranks - 1).bit_length(), BLOCK=_BLOCK, PADDED=most is not None,
        num_warps=4, **overlap(y.device),
    )  # fmt: skip
