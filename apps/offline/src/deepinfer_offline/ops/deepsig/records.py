"""Cache records: how window KV, compressed KV and index keys are stored, and the rounding that this implies.

Record formats (one record a cache entry, `n` channels, scales right after the data):

| format  | data                     | scales                    | bytes                | used for      |
|---------|--------------------------|---------------------------|----------------------|---------------|
| `fp8`   | n E4M3                   | UE8M0, one for 32 channels | n + ceil(n / 32)     | window KV     |
| `nvfp4` | n / 2 bytes of E2M1 pairs | E4M3, one for 16 channels  | n / 2 + ceil(n / 16) | compressed KV |
| `mxfp4` | n / 2 bytes of E2M1 pairs | UE8M0, one for 32 channels | n / 2 + ceil(n / 32) | index keys    |

At the released widths these are 528, 288 and 68 bytes. A last group that is not full counts as padded with zeros. Rounding
follows V4.1's cache rules: it is part of the model, also at float32, and is applied after the rotary embedding.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer_offline.ops.deepsig import cpu
from deepinfer_offline.ops.deepsig.formats import (
    E2M1_MAX,
    E4M3_MAX,
    decode_e2m1,
    encode_e2m1,
    pow2_ceil,
    ue8m0_bytes,
    ue8m0_values,
)

RecordFormat = Literal["fp8", "nvfp4", "mxfp4"]
LAYOUT_VERSION = 1  # interleaved records; a change of byte order or scale placement must raise it


class _Rule(NamedTuple):
    group: int  # channels that share a scale
    packed: bool  # two values a byte
    floor: float  # smallest amax that a scale is made for


_RULES: dict[str, _Rule] = {
    "fp8": _Rule(32, False, 1e-4),
    "nvfp4": _Rule(16, True, 6 * 2.0**-9),
    "mxfp4": _Rule(32, True, 6 * 2.0**-126),
}


def record_bytes(fmt: RecordFormat, channels: int) -> int:
    """Bytes of one record of `channels` channels (even for the packed formats)."""
    rule = _RULES[fmt]
    return (channels // 2 if rule.packed else channels) + -(-channels // rule.group)


def _scales(grouped: Tensor, fmt: RecordFormat) -> Tensor:
    """float32 [..., groups, 1] scales of float32 values [..., groups, group]."""
    amax = grouped.abs().amax(-1, keepdim=True).clamp_min(_RULES[fmt].floor)
    if fmt == "nvfp4":
        return (amax / E2M1_MAX).clamp_max(E4M3_MAX).to(torch.float8_e4m3fn).float()
    return pow2_ceil(amax * (1 / (E4M3_MAX if fmt == "fp8" else E2M1_MAX)))


def encode_records(values: Tensor, fmt: RecordFormat) -> Tensor:
    """Round `values` [..., n] to the format and lay each vector out as one record: uint8 [..., record_bytes]."""
    rule = _RULES[fmt]
    channels = values.shape[-1]
    if cpu.serves(values):
        flat = values.reshape(-1, channels).float()
        records = torch.empty(flat.shape[0], record_bytes(fmt, channels), dtype=torch.uint8)
        cpu.encode(flat, fmt, records, None)
        return records.view(*values.shape[:-1], -1)
    padded = functional.pad(values.float(), (0, -channels % rule.group)) if channels % rule.group else values.float()
    grouped = padded.unflatten(-1, (-1, rule.group))
    scale = _scales(grouped, fmt)
    quotient = (grouped / scale).flatten(-2)[..., :channels]
    if rule.packed:
        data = encode_e2m1(quotient)
    else:
        data = quotient.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    flat = scale.squeeze(-1)
    scale_bytes = flat.to(torch.float8_e4m3fn).view(torch.uint8) if fmt == "nvfp4" else ue8m0_bytes(flat)
    return torch.cat((data, scale_bytes), dim=-1)


def decode_records(records: Tensor, fmt: RecordFormat, channels: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of records uint8 [..., record_bytes]: [..., channels] of `dtype`. Exact in float32 and bfloat16."""
    rule = _RULES[fmt]
    width = channels // 2 if rule.packed else channels
    data, scale_bytes = records[..., :width], records[..., width:]
    if fmt == "nvfp4":
        scale = scale_bytes.view(torch.float8_e4m3fn).float()
    else:
        scale = ue8m0_values(scale_bytes)
    values = decode_e2m1(data) if rule.packed else data.view(torch.float8_e4m3fn).float()
    if channels % rule.group:
        values = values * scale.repeat_interleave(rule.group, dim=-1)[..., :channels]
    else:
        values.unflatten(-1, (-1, rule.group)).mul_(scale.unsqueeze(-1))
    return values.to(dtype)


def round_to_record(values: Tensor, fmt: RecordFormat) -> Tensor:
    """What `values` [..., n] read as after a trip through the cache; same shape and dtype."""
    records = encode_records(values, fmt)
    if cpu.serves(records):
        flat = records.view(-1, records.shape[-1])
        rows = torch.arange(flat.shape[0])
        return cpu.gather(flat, rows, fmt, values.shape[-1]).view(values.shape).to(values.dtype)
    return decode_records(records, fmt, values.shape[-1], values.dtype)


def kv_insert(pool: Tensor, slots: Tensor, values: Tensor, fmt: RecordFormat) -> None:
    """Round vectors and write them as records into a paged pool, in place.

    Args:
        pool: uint8 [num_slots, record_bytes], contiguous; slot = block * entries_per_block + offset.
        slots: int64 [t], one slot for each vector; -1 writes nothing. No slot occurs twice.
        values: float [t, n], after the rotary embedding.
        fmt: record format of the pool.
    """
    if cpu.serves(pool, slots, values):
        cpu.encode(values.float(), fmt, pool, slots)
        return
    records = encode_records(values, fmt)
    if slots.numel() and int(slots.min()) < 0:
        keep = slots >= 0
        slots, records = slots[keep], records[keep]
    pool.index_copy_(0, slots, records)


def kv_gather(pool: Tensor, slots: Tensor, fmt: RecordFormat, channels: int, dtype: torch.dtype) -> Tensor:
    """Read records back.

    Args:
        pool: uint8 [num_slots, record_bytes].
        slots: int64 [...]; -1 reads zeros, whatever the pool holds.
        fmt: record format of the pool.
        channels: values of one record.
        dtype: of the result.

    Returns:
        [..., channels].
    """
    if cpu.serves(pool) and slots.dtype == torch.int64:
        return cpu.gather(pool, slots.contiguous(), fmt, channels).to(dtype)
    flat = slots.flatten()
    absent = flat < 0
    if not bool(absent.any()):
        return decode_records(pool.index_select(0, flat), fmt, channels, dtype).view(*slots.shape, channels)
    # Zero bytes decode to zero in every format, so an absent entry can never bring a NaN into a product.
    records = pool.index_select(0, flat.clamp_min(0)).masked_fill_(absent.unsqueeze(-1), 0)
    return decode_records(records, fmt, channels, dtype).view(*slots.shape, channels)
