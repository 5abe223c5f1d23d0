"""Reading and writing cached records in plain torch."""

from __future__ import annotations

import torch

from ..layouts import FP8, MXFP4, NVFP4, V4, record_format
from . import quant


def encode_records(rows: torch.Tensor, fmt: str) -> torch.Tensor:
    """Encode float rows `[..., channels]` (channels a multiple of the group) as record bytes."""
    quantize = {FP8: quant.quantize_mxfp8, NVFP4: quant.quantize_nvfp4, MXFP4: quant.quantize_mxfp4}
    return torch.cat(quantize[record_format(fmt)](rows), -1)


def decode_records(records: torch.Tensor, fmt: str, channels: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Decode record bytes `[..., bytes]` to rows `[..., channels]`."""
    layout = record_format(fmt)
    cut = layout.payload_bytes(channels)
    payload, scales = records[..., :cut].contiguous(), records[..., cut:].contiguous()
    dequantize = {FP8: quant.dequantize_mxfp8, NVFP4: quant.dequantize_nvfp4, MXFP4: quant.dequantize_mxfp4}
    return dequantize[layout](payload, scales, dtype)


def new_pool(slots: int, fmt: str, channels: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Allocate a flat pool filled with 0xFF (NaN codes, NaN scales), so that a read of an unwritten row shows."""
    size = record_format(fmt).record_bytes(channels)
    return torch.full((slots, size), 0xFF, dtype=torch.uint8, device=device)


def kv_insert(pool: torch.Tensor, slots: torch.Tensor, values: torch.Tensor, fmt: str) -> None:
    """Encode and write rows `[n, channels]` at `slots` of a pool `[slots, bytes]`; negative slots are skipped."""
    keep = slots >= 0
    pool[slots[keep].long()] = encode_records(values[keep], fmt)


def kv_gather(
    pool: torch.Tensor, slots: torch.Tensor, fmt: str, channels: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Decode rows at `slots` of any shape into `[*slots.shape, channels]`; slots out of range give zeros."""
    flat = slots.reshape(-1).long()
    out = torch.zeros(flat.numel(), channels, dtype=dtype, device=pool.device)
    keep = (flat >= 0) & (flat < pool.shape[0])
    if keep.any():
        out[keep] = decode_records(pool[flat[keep]], fmt, channels, dtype)
    return out.reshape(*slots.shape, channels)


def v4_insert(pool: torch.Tensor, slots: torch.Tensor, values: torch.Tensor, page_size: int) -> None:
    """Write rows [n, 512] as V4's planar records into a pool [pages, bytes]; negative slots are skipped."""
    grouped = values[:, :448].float().unflatten(-1, (7, 64))
    scale = torch.exp2(torch.ceil(torch.log2(grouped.abs().amax(-1).clamp_min(V4.floor) / 448)))
    codes = (grouped / scale[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn).flatten(1).view(torch.uint8)
    tail = values[:, 448:].to(torch.bfloat16).contiguous().view(torch.uint8)
    exponents = (scale.log2().round().int() + 127).to(torch.uint8)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            page, place = pool[slot // page_size], slot % page_size
            begin = page_size * V4.payload_bytes + place * V4.scale_bytes
            page[place * V4.payload_bytes : (place + 1) * V4.payload_bytes] = torch.cat((codes[row], tail[row]))
            page[begin : begin + 7], page[begin + 7] = exponents[row], 0


def v4_gather(pool: torch.Tensor, slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """Read planar records back: slots [n] to float32 [n, 512]; negative slots give zeros."""
    out = torch.zeros(slots.shape[0], V4.channels, device=pool.device)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            page, place = pool[slot // page_size], slot % page_size
            record = page[place * V4.payload_bytes : (place + 1) * V4.payload_bytes]
            begin = page_size * V4.payload_bytes + place * V4.scale_bytes
            scale = torch.exp2(page[begin : begin + 7].float() - 127)
            out[row, :448] = (record[:448].view(torch.float8_e4m3fn).float().view(7, 64) * scale[:, None]).flatten()
            out[row, 448:] = record[448:].clone().view(torch.bfloat16).float()
    return out
