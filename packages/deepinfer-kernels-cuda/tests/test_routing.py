"""How the router's product is cut into blocks."""

from __future__ import annotations

from deepinfer_kernels_cuda import routing
from hypothesis import given
from hypothesis import strategies as st


@given(tiles=st.integers(1, 600), steps=st.integers(1, 200))
def test_no_span_is_empty_and_one_wave_stays_one(tiles: int, steps: int) -> None:
    spans = routing._spans(tiles, steps)
    each = -(-steps // spans)
    assert each * (spans - 1) < steps <= each * spans
    if tiles <= routing._MULTIPROCESSORS:
        assert tiles * spans <= 2 * routing._MULTIPROCESSORS, "a third wave never pays"


def test_few_tiles_fill_the_multiprocessors() -> None:
    """V4.1's 5120 columns in 80 steps: 1,024 tokens are 16 tiles of 128 tokens and 192 experts, 4,096 are 64."""
    assert routing._spans(16, 80) == 8
    assert routing._spans(64, 80) == 2
    assert routing._spans(256, 80) == 1
