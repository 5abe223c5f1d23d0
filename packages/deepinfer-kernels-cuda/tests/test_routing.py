"""How the router's product is cut into blocks."""

from __future__ import annotations

from deepinfer_kernels_cuda import routing
from hypothesis import given
from hypothesis import strategies as st


@given(t=st.integers(1, routing._TWO_LAUNCHES), d=st.integers(1, 16384))
def test_spans_cover_the_columns_and_all_blocks_fit(t: int, d: int) -> None:
    tiles, spans, steps, span = routing._cut(t, d)
    assert span * (spans - 1) < steps <= span * spans, "no span is empty"
    assert (steps - 1) * 64 < d <= steps * 64
    assert (tiles - 1) * 64 < t <= tiles * 64
    assert tiles * 4 * spans <= 132, "blocks that wait for each other are on the card at once"
    if t <= routing._ONE_LAUNCH:
        assert spans * t * 384 <= 16 * 128 * 384, "the parts fit into the mail"
        assert spans <= 16, "two spans for each of eight warps"
