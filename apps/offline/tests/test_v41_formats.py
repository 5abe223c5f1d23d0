"""Number formats and cache records against restatements in exact rational arithmetic."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from deepinfer_offline.ops.deepsig import (
    decode_records,
    encode_records,
    kv_gather,
    kv_insert,
    record_bytes,
    round_to_record,
)
from deepinfer_offline.ops.deepsig import formats as f
from hypothesis import given
from hypothesis import strategies as st

E2M1 = [Fraction(v) for v in ("0", "1/2", "1", "3/2", "2", "3", "4", "6")]
E4M3 = [Fraction(m, 8) * Fraction(2) ** -6 for m in range(8)] + [
    (1 + Fraction(m, 8)) * Fraction(2) ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)
]


def nearest(value: Fraction, levels: list[Fraction]) -> Fraction:
    """The level next to |value|, ties to the even index, with value's sign; too large values saturate."""
    size = abs(value)
    best = min(range(len(levels)), key=lambda i: (abs(levels[i] - size), i % 2))
    return levels[best] if value >= 0 else -levels[best]


def power_of_two_at_least(value: Fraction) -> Fraction:
    exponent = math.ceil(math.log2(float(value))) - 2
    while Fraction(2) ** exponent < value:
        exponent += 1
    return Fraction(2) ** exponent


def restated(values: list[float], fmt: str) -> list[float]:
    """The cache rounding of the notes, section 2.1, group by group, in rational numbers."""
    size = {"fp8": 32, "nvfp4": 16, "mxfp4": 32}[fmt]
    out = []
    for start in range(0, len(values), size):
        group = [Fraction(v) for v in values[start : start + size]]
        amax = max(abs(v) for v in group)
        if fmt == "fp8":
            # The reference multiplies by the float32 reciprocal of 448.
            quotient = torch.tensor(float(max(amax, Fraction(float(torch.tensor(1e-4)))))) * torch.tensor(1 / 448)
            scale, levels = power_of_two_at_least(Fraction(float(quotient))), E4M3
        elif fmt == "mxfp4":
            quotient = torch.tensor(float(max(amax, 6 * Fraction(2) ** -126))) * torch.tensor(1 / 6)
            scale, levels = power_of_two_at_least(Fraction(float(quotient))), E2M1
        else:
            quotient = torch.tensor(float(max(amax, 6 * Fraction(1, 512)))) / 6
            scale, levels = nearest(Fraction(float(quotient)), E4M3), E2M1
        out += [float(nearest(Fraction(float(torch.tensor(float(v)) / float(scale))), levels) * scale) for v in group]
    return out


@pytest.mark.parametrize("code", range(256))
def test_e4m3_table_matches_torch(code: int) -> None:
    value = torch.tensor([code], dtype=torch.uint8).view(torch.float8_e4m3fn).float().item()
    magnitude = code & 127
    if magnitude == 127:
        assert math.isnan(value)
    else:
        assert value == float(E4M3[magnitude]) * (-1 if code >= 128 else 1)


def test_e2m1_every_tie_goes_to_the_even_code() -> None:
    ties = [(a + b) / 2 for a, b in itertools.pairwise(E2M1)]
    values = [float(t) for t in ties] + [-float(t) for t in ties]
    expected = [float(nearest(Fraction(v), E2M1)) for v in values]
    assert expected[:7] == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert f.decode_e2m1(f.encode_e2m1(torch.tensor(values))).tolist() == expected


def test_e2m1_neighbours_of_ties_go_to_their_side() -> None:
    ties = torch.tensor([float((a + b) / 2) for a, b in itertools.pairwise(E2M1)] + [0.0])
    below = torch.nextafter(ties, torch.full_like(ties, -10.0))
    above = torch.nextafter(ties, torch.full_like(ties, 10.0))
    assert f.decode_e2m1(f.encode_e2m1(below))[:7].tolist() == [float(v) for v in E2M1[:-1]]
    assert f.decode_e2m1(f.encode_e2m1(above))[:7].tolist() == [float(v) for v in E2M1[1:]]


def test_packing_puts_even_columns_in_the_low_nibble() -> None:
    packed = f.encode_e2m1(torch.tensor([0.5, -6.0, 3.0, 0.0]))
    assert packed.tolist() == [0x1 | (0xF << 4), 0x5 | (0x0 << 4)]


@given(st.lists(st.floats(-3e4, 3e4, width=32), min_size=32, max_size=32), st.sampled_from(["fp8", "nvfp4", "mxfp4"]))
def test_records_round_as_restated(values: list[float], fmt: str) -> None:
    if fmt == "nvfp4":
        values = [v / 16 for v in values]  # its scale is an E4M3 number, so amax / 6 must stay below 448
    values = torch.tensor(values).tolist()
    assert round_to_record(torch.tensor([values]), fmt)[0].tolist() == restated(values, fmt)


@pytest.mark.parametrize("fmt", ["fp8", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("exponent", [-140, -30, -14, -9, 0, 7])
def test_scale_boundaries(fmt: str, exponent: int) -> None:
    """amax exactly at, just below and just above the point where the scale doubles."""
    top = {"fp8": 448.0, "nvfp4": 6.0, "mxfp4": 6.0}[fmt]
    edge = torch.tensor(top * 2.0**exponent)
    for amax in (edge, torch.nextafter(edge, edge * 2), torch.nextafter(edge, edge * 0)):
        values = (torch.linspace(-1, 1, 32) * amax).tolist()
        assert round_to_record(torch.tensor([values]), fmt)[0].tolist() == restated(values, fmt)


@pytest.mark.parametrize(("fmt", "channels", "size"), [("fp8", 512, 528), ("nvfp4", 512, 288), ("mxfp4", 128, 68)])
def test_released_record_sizes(fmt: str, channels: int, size: int) -> None:
    assert record_bytes(fmt, channels) == size
    assert encode_records(torch.randn(3, channels), fmt).shape == (3, size)


@pytest.mark.parametrize("fmt", ["fp8", "nvfp4", "mxfp4"])
def test_zero_stays_zero_and_storage_is_stable(fmt: str) -> None:
    assert not round_to_record(torch.zeros(2, 48), fmt).any()
    values = torch.randn(200, 48)
    once = round_to_record(values, fmt)
    assert torch.equal(decode_records(encode_records(once, fmt), fmt, 48), once)


@pytest.mark.parametrize("fmt", ["fp8", "nvfp4", "mxfp4"])
def test_values_are_exact_in_bfloat16(fmt: str) -> None:
    records = encode_records(torch.randn(500, 64) * 3, fmt)
    wide = decode_records(records, fmt, 64)
    assert torch.equal(decode_records(records, fmt, 64, torch.bfloat16).float(), wide)


def test_insert_skips_absent_slots_and_gather_hides_what_lies_there() -> None:
    pool = torch.full((6, record_bytes("fp8", 32)), 0x7F, dtype=torch.uint8)  # 0x7F is NaN
    values = torch.randn(3, 32)
    kv_insert(pool, torch.tensor([4, -1, 2]), values, "fp8")
    read = kv_gather(pool, torch.tensor([[2, -1], [4, -1]]), "fp8", 32, torch.float32)
    assert torch.equal(read[:, 0], round_to_record(values[[2, 0]], "fp8"))
    assert not read[:, 1].any()
    assert (pool[[0, 1, 3, 5]] == 0x7F).all()


@pytest.mark.parametrize(("rows", "columns"), [(32, 32), (64, 96), (40, 70), (5, 33)])
def test_weight_tiles_round_trip(rows: int, columns: int) -> None:
    weight = torch.randn(rows, columns)
    codes, scales = f.quantize_fp8_tiles(weight)
    assert scales.shape == (-(-rows // 32), -(-columns // 32))
    back = f.dequantize_fp8_tiles(codes, scales)
    for i in range(rows):
        for j in range(0, columns, 7):
            expected = codes[i, j].float() * scales[i // 32, j // 32].float()
            assert back[i, j] == expected
    # E4M3 has 3 mantissa bits: half a step is 2^-4 of the value; the smallest steps are below 2^-8 of the tile's maximum.
    assert ((back - weight).abs() <= weight.abs() / 16 + weight.abs().max() / 256).all()
    again = f.dequantize_fp8_tiles(*f.quantize_fp8_tiles(back))
    assert torch.equal(again, back)


@pytest.mark.parametrize(("rows", "columns"), [(4, 32), (7, 64), (3, 40)])
def test_fp4_rows_round_trip(rows: int, columns: int) -> None:
    weight = torch.randn(rows, columns)
    codes, scales = f.quantize_fp4_rows(weight)
    assert codes.shape == (rows, columns // 2)
    assert codes.dtype == torch.int8
    back = f.dequantize_fp4_rows(codes, scales)
    for i in range(rows):
        expected = restated(weight[i].tolist(), "mxfp4")
        assert back[i].tolist() == expected


def test_scale_byte_zero_is_a_subnormal_not_zero() -> None:
    assert f.ue8m0_values(torch.tensor([0, 127, 254], dtype=torch.uint8)).tolist() == [2.0**-127, 1.0, 2.0**127]
