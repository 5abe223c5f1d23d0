"""Rows of expert parallelism inside one rank: numbered, put into segments of a buffer, and summed when they come back.

Kernels on CUDA (and in Triton's interpreter), plain torch elsewhere; equal results. `places` int32 [t, ranks] says which row of a
rank's segment a token has, -1 where it does not go there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .capability import interpreting
from .overlap import overlap

#: Words of a block of rows.
_BLOCK = 1024
#: Tokens that a program numbers; with 16 warps the fastest of 256 to 2,048 at 16,384 tokens on an H200.
_TOKENS = 512


@dataclass(frozen=True)
class Segments:
    """Where the segment of each rank begins in a buffer of rows.

    Attributes:
        first: Row of the first segment.
        apart: Rows from one segment to the next.
        own: Rows that this rank's segment lies behind its place among the others.
        counts: int32 [ranks], rows of each segment, which lie one behind the other, without that of this rank; or int32 [ranks,
            ranks], rows from a source to a destination: this rank's segment in the buffer of each rank.
    """

    first: int = 0
    apart: int = 0
    own: int = 0
    counts: torch.Tensor | None = None

    def start(self, rank: int, me: int) -> int:
        """Row where the segment of a rank begins; reads `counts`."""
        start = self.first + rank * self.apart + (self.own if rank == me else 0)
        if self.counts is not None and self.counts.dim() == 1:
            start += int(self.counts[:rank].sum()) - (int(self.counts[me]) if me < rank else 0)
        if self.counts is not None and self.counts.dim() == 2:
            start += int(self.counts[:me, rank].sum())
        return start


@dataclass(frozen=True)
class Target:
    """Buffers of rows x [n, d], local expert ids int64 [n, k] and weights float32 [n, k]; only the last stride must be 1.

    Attributes:
        delta: int64 [ranks], bytes from an address here to the same place in each rank's memory; None: segments lie here.
    """

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    delta: torch.Tensor | None = None


class HostCounts:
    """Fetches counts to the host while the device goes on with what was enqueued after `mark`."""

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        if self._cuda:
            self._known = torch.empty(shape, dtype=torch.int32, pin_memory=True)
            self._side = torch.cuda.Stream(device)
            self._ready, self._here = torch.cuda.Event(), torch.cuda.Event()

    def mark(self) -> None:
        """The counts are there once what was enqueued until now is done."""
        if self._cuda:
            self._ready.record()

    def fetch(self, counts: torch.Tensor) -> list[list[int]]:
        """Counts int32 as lists; waits for the device as far as `mark`."""
        if not self._cuda:
            return counts.tolist()
        with torch.cuda.stream(self._side):
            self._side.wait_event(self._ready)
            self._known.copy_(counts, non_blocking=True)
            self._here.record()
        self._here.synchronize()
        return self._known.tolist()


def _kernels(device: torch.device) -> bool:
    return device.type == "cuda" or interpreting()


def words(x: torch.Tensor) -> torch.Tensor:
    """The same bytes as integers of 4, 2 or 1 bytes, whichever divides a row."""
    size = x.shape[-1] * x.element_size()
    return x.view(torch.int32 if size % 4 == 0 else torch.int16 if size % 2 == 0 else torch.uint8)


def number_rows(
    ids: torch.Tensor, local: int, ranks: int, counts: torch.Tensor, delta: torch.Tensor | None = None
) -> torch.Tensor:
    """Places int32 [t, ranks] by the order of tokens; how many go to each rank goes to `counts`, with `delta` at every peer.

    Args:
        ids: int64 [t, k], contiguous.
        local: Experts of a rank.
        ranks: Ranks.
        counts: int32 [ranks].
        delta: As in `Target`.
    """
    tokens, top_k = ids.shape
    places = torch.empty(tokens, ranks, dtype=torch.int32, device=ids.device)
    if not _kernels(ids.device):
        owner = torch.where(ids >= 0, ids // local, -1)
        wanted = (owner[:, :, None] == torch.arange(ranks, device=ids.device)).any(1)
        counts.copy_(wanted.sum(0))
        return torch.where(wanted, wanted.cumsum(0, dtype=torch.int32) - 1, -1)
    from .kernels.parallel import number_rows_kernel

    number_rows_kernel[(ranks, max(1, -(-tokens // _TOKENS)))](
        ids, places, counts, delta, tokens, local, ranks, K=top_k, BK=1 << (top_k - 1).bit_length(), BLOCK=_TOKENS,
        PEERS=delta is not None, num_warps=16, **overlap(ids.device),
    )  # fmt: skip
    return places


def send_rows(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, places: torch.Tensor, target: Target, segments: Segments, *,
    me: int, local: int, to: range, without: int = -1, padded: int | None = None,
) -> None:  # fmt: skip
    """Write every token to the segments of its ranks.

    Args:
        x: [t, d].
        ids: int64 [t, k], contiguous.
        weights: float32 [t, k], contiguous.
        places: int32 [t, ranks]; read, or with `padded` written: a token's number is its place.
        target: Where to.
        segments: Where those of the ranks begin.
        me: This rank.
        local: Experts of a rank.
        to: Ranks that are served.
        without: One of them that is not; not with `padded`.
        padded: Rows of a segment; those that no token has get ids of -1.
    """
    tokens, top_k = ids.shape
    rows = tokens if padded is None else padded
    if not rows or not len(to):
        return
    if not _kernels(x.device):
        _send_here(x, ids, weights, places, target, segments, me, local, to, without, padded)
        return
    from .kernels.parallel import send_rows_kernel

    size = x.element_size()
    if x.stride(0) * size % 4 or x.storage_offset() * size % 4:
        x = x.clone(memory_format=torch.contiguous_format)  # words do not begin where its rows do
    source, there = words(x), words(target.x)
    width, ranks = source.shape[1], places.shape[1]
    send_rows_kernel[(rows, -(-width // _BLOCK))](
        source, ids, weights, places, segments.counts, there, target.ids, target.weights, target.delta, tokens, width,
        source.stride(0), there.stride(0), target.ids.stride(0), target.weights.stride(0), local, ranks, me, to.start, to.stop,
        without, segments.first, segments.apart, segments.own, K=top_k,
        BK=1 << (top_k - 1).bit_length(), BR=1 << (ranks - 1).bit_length(),
        BLOCK=_BLOCK, COUNTED=0 if segments.counts is None else segments.counts.dim(), PADDED=padded is not None,
        PEERS=target.delta is not None, num_warps=4, **overlap(x.device),
    )  # fmt: skip


def _send_here(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, places: torch.Tensor, target: Target, segments: Segments,
    me: int, local: int, to: range, without: int, padded: int | None,
) -> None:  # fmt: skip
    tokens = torch.arange(len(x), device=x.device)
    for rank in to:
        own = (ids >= rank * local) & (ids < (rank + 1) * local)
        if padded is not None:
            places[:, rank] = torch.where(own.any(-1), tokens.int(), -1)
        elif rank == without:
            continue
        goes = places[:, rank] >= 0
        start = segments.start(rank, me)
        if padded is not None:
            target.ids[start : start + padded] = -1
        at = start + places[goes, rank].long()
        target.x[at] = x[goes]
        target.ids[at] = torch.where(own, ids - rank * local, -1)[goes]
        target.weights[at] = weights[goes]


def sum_rows(
    y: torch.Tensor, back: torch.Tensor, places: torch.Tensor, segments: Segments, *, me: int, here: int
) -> torch.Tensor:
    """What the ranks gave for each token: float32 sums in the order of ranks, rounded once.

    Args:
        y: [m, d], contiguous: rows of rank `me`'s segment begin at `here`.
        back: [n, d], contiguous: the others' segments.
        places: int32 [t, ranks], contiguous.
        segments: Where those in `back` begin.
        me: This rank.
        here: Row of y.

    Returns:
        [t, d] in the dtype of y; zeros for a token without any expert.
    """
    tokens, ranks = places.shape
    width = y.shape[1]
    out = y.new_empty(tokens, width)
    if not tokens:
        return out
    if not _kernels(y.device):
        total = torch.zeros(tokens, width, device=y.device)
        for rank in range(ranks):
            goes = places[:, rank] >= 0
            rows, start = (y, here) if rank == me else (back, segments.start(rank, me))
            total[goes] += rows[start + places[goes, rank].long()].float()
        return total.to(y.dtype)
    from .kernels.parallel import sum_rows_kernel

    block = min(_BLOCK, 1 << (width - 1).bit_length())
    sum_rows_kernel[(tokens, -(-width // block))](
        y, back, places, segments.counts, out, width, y.stride(0), ranks, me, here, segments.first, segments.apart,
        BR=1 << (ranks - 1).bit_length(), BLOCK=block, COUNTED=0 if segments.counts is None else segments.counts.dim(),
        num_warps=4, **overlap(y.device),
    )  # fmt: skip
    return out
