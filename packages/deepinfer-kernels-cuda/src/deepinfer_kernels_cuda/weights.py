"""Microscaled weights: as the checkpoint stores them, and repacked once for the Hopper GEMM."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .checks import require, require_dims

#: Weight rows and columns of a packed tile.
TILE_ROWS, TILE_COLUMNS = 64, 128


@dataclass(frozen=True)
class MxWeights:
    """Weights [experts, rows, columns] in microscaled codes.

    Attributes:
        codes: Natural: uint8 [E, N, K / 2] (e2m1 pairs, even column low) or [E, N, K] (e4m3). Packed: int16 or int32,
            see `pack_sm90`.
        scales: Natural: uint8 E8M0 [E, N, ceil(K / 32)]. Packed: int32 [E, K tiles, N tiles * 64], four bytes a word.
        rows: N.
        columns: K.
        fp4: e2m1 codes (else e4m3).
        packed: Laid out for the Hopper kernel.
        swiglu: Packed with gate and up rows interleaved.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    rows: int
    columns: int
    fp4: bool
    packed: bool = False
    swiglu: bool = False

    @property
    def experts(self) -> int:
        """Matrices in the stack."""
        return self.codes.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(t.numel() * t.element_size() for t in (self.codes, self.scales))


def mx_weights(codes: torch.Tensor, scales: torch.Tensor, *, fp4: bool) -> MxWeights:
    """Wrap checkpoint tensors.

    Args:
        codes: int8/uint8 [E, N, K / 2] or [N, K / 2] for e2m1, float8_e4m3fn or uint8 [E, N, K] or [N, K] for e4m3.
        scales: E8M0 (uint8 or float8_e8m0fnu): [.., N, ceil(K / 32)], or one a 32x32 tile [.., ceil(N / 32), ceil(K / 32)].
        fp4: Which of the two.

    Raises:
        ArgumentError: Shapes that do not belong together.
    """
    codes, scales = codes.view(torch.uint8), scales.view(torch.uint8)
    if codes.dim() == 2:
        codes, scales = codes[None], scales[None]
    require_dims("codes", codes, 3)
    require_dims("scales", scales, 3)
    rows, columns = codes.shape[1], codes.shape[2] * (2 if fp4 else 1)
    groups = -(-columns // 32)
    if scales.shape[1] == -(-rows // 32) and rows > scales.shape[1]:
        scales = scales.repeat_interleave(32, 1)[:, :rows]
    want = (codes.shape[0], rows, groups)
    require(
        tuple(scales.shape) == want, f"scales have shape {tuple(scales.shape)}; codes of {rows}x{columns} need {want}"
    )
    return MxWeights(codes.contiguous(), scales.contiguous(), rows, columns, fp4)


def pack_sm90(weights: MxWeights, *, swiglu: bool = False) -> MxWeights:
    """Repack for the Hopper kernel; done once, at load, one expert at a time.

    A tile of 64 rows x 128 columns becomes [parts, 128 threads, 16 bytes]: a thread's own MMA fragment. Element bits hold
    four chunks of 32 columns (`sm90/mx_gemm.py`). Missing rows and columns become zero codes.

    Args:
        weights: Natural weights.
        swiglu: Rows are gate rows then up rows: interleave them by 8 so that a thread holds both of a channel.
    """
    require(not weights.packed, "weights are packed already")
    n, k = weights.rows, weights.columns
    require(not swiglu or n % 16 == 0, f"swiglu packing needs rows divisible by 16, not {n}")
    n_tiles, k_tiles = -(-n // TILE_ROWS), -(-k // TILE_COLUMNS)
    order = _row_order(n, n_tiles, swiglu, weights.codes.device)
    codes, scales = [], []
    for e in range(weights.experts):
        dense = _expand(weights.codes[e], weights.fp4)
        padded = torch.zeros(n_tiles * 64, k_tiles * 128, dtype=torch.uint8, device=dense.device)
        keep = order >= 0
        padded[keep, :k] = dense[order[keep]]
        codes.append(_pack_fp4(padded, n_tiles, k_tiles) if weights.fp4 else _pack_fp8(padded, n_tiles, k_tiles))
        bytes_ = torch.zeros(n_tiles * 64, k_tiles * 4, dtype=torch.uint8, device=dense.device)
        bytes_[keep, : weights.scales.shape[2]] = weights.scales[e][order[keep]]
        scales.append(_pack_scales(bytes_.view(n_tiles * 64, k_tiles, 4), weights.fp4))
    return MxWeights(torch.stack(codes), torch.stack(scales), n, k, weights.fp4, packed=True, swiglu=swiglu)


def _row_order(n: int, n_tiles: int, swiglu: bool, device: torch.device) -> torch.Tensor:
    """Source row of every packed row, -1 for padding."""
    row = torch.arange(n_tiles * 64, device=device)
    if swiglu:
        channel, up = (row // 16) * 8 + row % 8, (row % 16) // 8
        return torch.where(channel < n // 2, channel + up * (n // 2), -1)
    return torch.where(row < n, row, -1)


def _expand(codes: torch.Tensor, fp4: bool) -> torch.Tensor:
    """One code a byte, [N, K]."""
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2) if fp4 else codes


def _pack_scales(codes: torch.Tensor, fp4: bool) -> torch.Tensor:
    """E8M0 [rows, K tiles, 4 chunks] -> int32 words [K tiles, rows], exponents of bf16 factors ready in place.

    Byte 0 lands in bits 14:7, byte 1 in 30:23, bytes 2 and 3 likewise in the word rotated left by 8.
    """
    exponent = (codes.to(torch.int64) + (66 if fp4 else 60)).clamp_max(254)  # codes carry 2^-126 / 2^-120, result 2^-60
    f0, f1, f2, f3 = exponent.unbind(-1)
    rotated = (f2 << 7) | (f3 << 23)
    word = (f0 << 7) | (f1 << 23) | (rotated >> 8) | ((rotated & 0xFF) << 24)
    word = torch.where(word >= 2**31, word - 2**32, word)
    return word.to(torch.int32).t().contiguous()


def _pack_fp4(codes: torch.Tensor, n_tiles: int, k_tiles: int) -> torch.Tensor:
    # rows: tile, warp 4, b1 2, g 8; columns: tile, chunk 4, half 2, b2 2, t 4, b0 2
    split = codes.view(n_tiles, 4, 2, 8, k_tiles, 4, 2, 2, 4, 2)
    # -> tile, k tile, half, warp, g, t, b2, b1, b0, chunk
    ordered = split.permute(0, 4, 6, 1, 3, 8, 7, 2, 9, 5).to(torch.int32)
    sign, magnitude = ordered >> 3, ordered & 7
    s0, s1, s2, s3 = sign.unbind(-1)
    m0, m1, m2, m3 = magnitude.unbind(-1)
    word = (s0 << 15) | (m0 << 6) | (s1 << 12) | (m1 << 3) | (s2 << 9) | m2
    word |= (s3 << 14) | ((m3 >> 1) << 10) | ((m3 & 1) << 13)
    word = torch.where(word >= 0x8000, word - 0x10000, word)
    return word.to(torch.int16).reshape(n_tiles, k_tiles, 2, 128, 8).view(torch.int32)


def _pack_fp8(codes: torch.Tensor, n_tiles: int, k_tiles: int) -> torch.Tensor:
    split = codes.view(n_tiles, 4, 2, 8, k_tiles, 4, 2, 2, 4, 2)
    # -> tile, k tile, half, b2, warp, g, t, b1, b0, chunk
    ordered = split.permute(0, 4, 6, 7, 1, 3, 8, 2, 9, 5).contiguous()
    return ordered.view(torch.int32).reshape(n_tiles, k_tiles, 4, 128, 4)
