"""The grouped output projection and Engram's gate against the portable model code."""

from __future__ import annotations

import pytest
from kernel_kit import DEVICE, DTYPES, INTERPRET, MARKS, assert_near, kernels, portable, rand, torch

pytestmark = MARKS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("t", "heads", "n", "groups", "rank", "pairs"),
    [(5, 4, 64, 2, 24, 16), (1, 3, 96, 3, 16, 32), (18, 6, 80, 2, 33, 8), (3, 2, 40, 1, 8, 5), (0, 2, 64, 2, 8, 16)]
    + ([] if INTERPRET else [(64, 64, 512, 8, 1024, 32), (7, 64, 512, 8, 1024, 32), (300, 64, 512, 8, 1024, 32)]),
)
def test_grouped_output(t, heads, n, groups, rank, pairs, dtype) -> None:
    # Heads are the inner part of a wider buffer: strides count, what is between holds NaN.
    buffer = torch.full((t, heads, n + 16), torch.nan, dtype=dtype, device=DEVICE)
    attended = buffer[..., :n]
    attended.copy_(rand(t, heads, n, dtype=dtype))
    weight = rand(groups, rank, heads // groups * n, dtype=dtype) * n**-0.5
    frequencies = portable.rope_frequencies(2 * pairs, 1e4).to(DEVICE)
    table = portable.rotary_table(torch.arange(t, device=DEVICE) * 13 + 1, frequencies)
    straight = portable.apply_rope(attended.float().contiguous(), table, inverse=True)
    want = torch.einsum("tgc,grc->tgr", straight.reshape(t, groups, heads // groups * n), weight.float()).flatten(1)
    out = kernels.grouped_output(attended, weight, table)
    assert out.shape == (t, groups * rank)
    if t:
        assert_near(out, want, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("t", "s", "d", "m"),
    [(5, 4, 96, 40), (1, 2, 64, 16), (0, 4, 64, 16)] + ([] if INTERPRET else [(70, 4, 5120, 6144)]),
)
def test_engram(t, s, d, m, dtype) -> None:
    streams, memory = rand(t, s, d, dtype=dtype), rand(t, m, dtype=dtype)
    wkv, q_weight, k_weight = (
        rand((s + 1) * d, m, dtype=dtype) * m**-0.5,
        rand(s, d, dtype=dtype),
        rand(s, d, dtype=dtype),
    )
    want = portable.engram_update(streams, memory, wkv, q_weight, k_weight, eps=1e-20)
    out = kernels.engram_update(streams, memory, wkv, q_weight, k_weight, eps=1e-20)
    assert out.shape == (t, s, d)
    if t:
        assert_near(out, want, dtype)
        projected = torch.nn.functional.linear(memory, wkv)
        again = kernels.engram_gate(streams, projected, q_weight, k_weight, eps=1e-20, inplace=True)
        assert again is streams
        assert torch.equal(again, out)
