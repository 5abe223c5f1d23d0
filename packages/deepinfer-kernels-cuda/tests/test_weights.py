"""Repacked weights hold the same numbers: the kernel's bit operations, replayed in torch on the packed words."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from deepinfer_kernels_cuda.errors import ArgumentError  # noqa: E402
from deepinfer_kernels_cuda.reference.experts import dense_weights  # noqa: E402
from deepinfer_kernels_cuda.weights import mx_weights, pack_sm90  # noqa: E402


def as_bf16(words):
    """int64 tensors of 16-bit patterns as float64 values of bfloat16."""
    return (
        (words << 16)
        .to(torch.int64)
        .where(words < 2**15, (words << 16) - 2**32)
        .to(torch.int32)
        .view(torch.float32)
        .double()
    )


def unpack(packed, fp4: bool):
    """Do what the kernel does with one matrix: [rows, columns] float64."""
    n_tiles, k_tiles = packed.codes.shape[1:3]
    words = packed.codes[0].to(torch.int64) & 0xFFFFFFFF
    scale = packed.scales[0].to(torch.int64) & 0xFFFFFFFF  # [k tiles, rows]
    high = ((scale << 8) | (scale >> 24)) & 0x7F807F80
    low = scale & 0x7F807F80
    factors = [as_bf16(f & 0xFFFF) for f in (low, low >> 16, high, high >> 16)]
    if fp4:
        x = torch.stack((words & 0xFFFF, words >> 16), -1)  # [n, k, half, thread, (b2, b1), b0]
        x = x.view(n_tiles, k_tiles, 2, 4, 8, 4, 2, 2, 2)  # half, warp, g, t, b2, b1, b0
        x = x.permute(0, 3, 7, 4, 1, 2, 6, 5, 8)
        chunks = [x & 0x81C0, (x << 3) & 0x81C0, (x << 6) & 0x81C0,
                  ((x << 1) & 0x8000) | ((x >> 3) & 0x0180) | ((x >> 7) & 0x0040)]  # fmt: skip
        shift = 2.0**126
    else:
        x = words.view(n_tiles, k_tiles, 2, 2, 4, 8, 4, 2, 2)  # half, b2, warp, g, t, b1, b0
        x = x.permute(0, 4, 7, 5, 1, 2, 3, 6, 8)
        chunks = []
        for c in range(4):
            byte = (x >> (8 * c)) & 0xFF
            chunks.append(((byte << 8) & 0x8000) | ((byte << 4) & 0x07F0))
        shift = 2.0**120
    values = torch.stack([as_bf16(chunk) * shift for chunk in chunks], 5)  # chunk after the k tile
    values = values.reshape(n_tiles * 64, k_tiles, 4, 32)
    factor = torch.stack(factors, -1).permute(1, 0, 2)[..., None]
    result = values * factor * (2.0**60 / shift)
    return result.reshape(n_tiles * 64, k_tiles * 128)


@pytest.mark.parametrize(("rows", "columns"), [(64, 128), (96, 160), (16, 32), (130, 400)])
@pytest.mark.parametrize("fp4", [True, False])
def test_packed_words_decode_to_the_same_numbers(rows, columns, fp4) -> None:
    generator = torch.Generator().manual_seed(rows * 7 + columns)
    codes = torch.randint(0, 256, (1, rows, columns // 2 if fp4 else columns), dtype=torch.uint8, generator=generator)
    if not fp4:
        codes[(codes & 0x7F) == 0x7F] = 0  # no NaN weights
    scales = torch.randint(90, 150, (1, rows, -(-columns // 32)), dtype=torch.uint8, generator=generator)
    natural = mx_weights(codes, scales, fp4=fp4)
    want = dense_weights(natural, 0)
    got = unpack(pack_sm90(natural), fp4)
    assert torch.equal(got[:rows, :columns], want)
    assert (got[rows:] == 0).all()
    assert (got[:, columns:] == 0).all()


def test_swiglu_interleaves_gate_and_up_by_eight() -> None:
    codes = torch.randint(0, 256, (1, 64, 64), dtype=torch.uint8)
    natural = mx_weights(codes, torch.full((1, 64, 4), 127, dtype=torch.uint8), fp4=True)
    want, got = dense_weights(natural, 0), unpack(pack_sm90(natural, swiglu=True), True)
    for channel in range(32):
        row = (channel // 8) * 16 + channel % 8
        assert torch.equal(got[row], want[channel])
        assert torch.equal(got[row + 8], want[32 + channel])


def test_scales_of_tiles_are_spread_to_rows() -> None:
    codes = torch.zeros(70, 64, dtype=torch.uint8)
    scales = torch.arange(6, dtype=torch.uint8).view(3, 2)
    assert mx_weights(codes, scales, fp4=False).scales[0, :, 0].tolist() == [0] * 32 + [2] * 32 + [4] * 6


def test_mismatched_shapes_are_named() -> None:
    with pytest.raises(ArgumentError, match="scales have shape"):
        mx_weights(torch.zeros(64, 64, dtype=torch.uint8), torch.zeros(64, 3, dtype=torch.uint8), fp4=False)
    natural = mx_weights(torch.zeros(20, 64, dtype=torch.uint8), torch.zeros(20, 2, dtype=torch.uint8), fp4=False)
    with pytest.raises(ArgumentError, match="divisible by 16"):
        pack_sm90(natural, swiglu=True)
