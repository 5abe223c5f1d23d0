"""Hyper-connections against the portable ops."""

from __future__ import annotations

import pytest
from kernel_kit import DTYPES, INTERPRET, MARKS, assert_near, kernels, portable, rand, torch

pytestmark = MARKS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("t", "s", "d"),
    [(5, 4, 160), (1, 4, 64), (18, 2, 96)]
    + ([] if INTERPRET else [(300, 4, 5120), (17, 4, 5120), (515, 4, 5120), (3, 4, 4096), (4300, 4, 1024)]),
)
def test_mhc(t, s, d, dtype) -> None:
    streams, output = rand(t, s, d, dtype=dtype), rand(t, d, dtype=dtype)
    fn, base, scale = rand(s * (s + 2), s * d) * d**-0.5, rand(s * (s + 2)), rand(3)
    weight, options = rand(d, dtype=dtype), {"iterations": 20, "eps": 1e-6, "norm_eps": 1e-20}
    mix = portable.mhc_pre(streams, fn, base, scale, **options)
    ours = kernels.mhc_pre(streams, fn, base, scale, **options)
    for a, b in zip(ours, mix, strict=True):
        assert_near(a, b, torch.float32 if dtype == torch.float32 else dtype)
    new = portable.mhc_post(output, streams, mix.post, mix.comb)
    assert_near(kernels.mhc_post(output, streams, mix.post, mix.comb), new, dtype)
    assert_near(kernels.mhc_collapse(streams, mix.pre), portable.mhc_collapse(streams, mix.pre), dtype)
    step = kernels.mhc_step(streams, fn, base, scale, pre=mix.pre, norm_weight=weight, output=output, post=mix.post,
                            comb=mix.comb, **options)  # fmt: skip
    assert_near(step.streams, new, dtype)
    following = portable.mhc_pre(new, fn, base, scale, **options)
    for a, b in zip(step.mix, following, strict=True):
        assert_near(a, b, dtype)
    assert_near(step.x, portable.rms_norm(portable.mhc_collapse(new, mix.pre), weight, 1e-20), dtype)
