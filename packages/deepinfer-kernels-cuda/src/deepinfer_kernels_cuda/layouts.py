"""Byte layouts of cached records, with a version: equal byte counts have meant two orders before.

A pool is a uint8 tensor `[slots, record_bytes]` or `[pages, page_size, record_bytes]`; every stride but the last is
free. A record is its codes followed by its scales. A row is addressed by its slot `page * page_size + offset`, int32 or
int64; -1 means no row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .checks import require, require_dtype, require_inner
from .errors import ArgumentError

#: Interleaved records: a row's scales right after its codes. Raised when byte order or scale placement changes.
LAYOUT_VERSION = 1


@dataclass(frozen=True)
class RecordFormat:
    """One record format.

    Attributes:
        name: `fp8`, `nvfp4` or `mxfp4`, the names of the portable ops.
        packed: Two e2m1 values a byte (the even channel in the low nibble) instead of one e4m3 value a byte.
        group: Channels that share a scale; a last group that is not full counts as padded with zeros.
        floor: Smallest group maximum that a scale is made for.
        code: Number of the format inside kernels.
    """

    name: str
    packed: bool
    group: int
    floor: float
    code: int

    def payload_bytes(self, channels: int) -> int:
        """Bytes of a record's codes."""
        return channels // 2 if self.packed else channels

    def record_bytes(self, channels: int) -> int:
        """Bytes of a record, codes and scales."""
        return self.payload_bytes(channels) + -(-channels // self.group)


#: Window KV: e4m3 codes, one E8M0 scale for 32 channels; 528 bytes at 512 channels.
FP8 = RecordFormat("fp8", packed=False, group=32, floor=1e-4, code=0)
#: Compressed KV: e2m1 codes, one e4m3 scale for 16 channels; 288 bytes at 512 channels.
NVFP4 = RecordFormat("nvfp4", packed=True, group=16, floor=6 * 2.0**-9, code=1)
#: Index keys: e2m1 codes, one E8M0 scale for 32 channels; 68 bytes at 128 channels.
MXFP4 = RecordFormat("mxfp4", packed=True, group=32, floor=6 * 2.0**-126, code=2)

FORMATS = {fmt.name: fmt for fmt in (FP8, NVFP4, MXFP4)}


@dataclass(frozen=True)
class PlanarFormat:
    """V4's record of 512 channels: 448 e4m3 (a scale for 64) and 64 bfloat16; a page holds all rows, then all scale rows.

    Attributes:
        payload_bytes: Of a row.
        scale_bytes: Of a row's scales: seven E8M0 and one byte of padding.
        channels: Of a record.
        floor: Smallest group maximum that a scale is made for.
    """

    payload_bytes: int = 576
    scale_bytes: int = 8
    channels: int = 512
    floor: float = 1e-4

    @property
    def record_bytes(self) -> int:
        """Bytes of a row and its scales."""
        return self.payload_bytes + self.scale_bytes

    def page_bytes(self, page_size: int) -> int:
        """Bytes of a page of so many rows, padded to a multiple of a row's payload."""
        return -(-self.record_bytes * page_size // self.payload_bytes) * self.payload_bytes


V4 = PlanarFormat()


def record_format(name: str) -> RecordFormat:
    """Look a format up by name.

    Raises:
        ArgumentError: Unknown name; the message lists the known ones.
    """
    if name not in FORMATS:
        raise ArgumentError(f"record format {name!r} is not one of {', '.join(FORMATS)}")
    return FORMATS[name]


@dataclass(frozen=True)
class PoolView:
    """Geometry of a pool as kernels take it: byte strides and rows a page (1 for a flat pool)."""

    stride_page: int
    stride_row: int
    page_size: int
    slots: int


def pool_view(pool: torch.Tensor, fmt: RecordFormat, channels: int) -> PoolView:
    """Check a pool and read its geometry off its shape and strides.

    Raises:
        ArgumentError: Wrong dtype, rank, record size or inner stride.
    """
    require_dtype("pool", pool, torch.uint8)
    require(pool.dim() in (2, 3), f"pool has shape {tuple(pool.shape)}; allowed: [slots, bytes], [pages, page, bytes]")
    want = fmt.record_bytes(channels)
    require(
        pool.shape[-1] == want, f"pool rows have {pool.shape[-1]} bytes; {fmt.name} of {channels} channels has {want}"
    )
    require_inner("pool", pool)
    if pool.dim() == 2:
        return PoolView(pool.stride(0), 0, 1, pool.shape[0])
    return PoolView(pool.stride(0), pool.stride(1), pool.shape[1], pool.shape[0] * pool.shape[1])
