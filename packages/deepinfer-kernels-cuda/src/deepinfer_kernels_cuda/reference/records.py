"""Reading and writing cached records in plain torch."""

from __future__ import annotations

import torch

from ..layouts import FP8, MXFP4, NVFP4, record_format
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
