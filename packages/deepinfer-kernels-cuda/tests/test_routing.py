"""How the router's product is cut into blocks."""

from __future__ import annotations

import re

import pytest
import torch
from deepinfer_kernels_cuda import routing
from deepinfer_kernels_cuda.catalogue import _NATIVE
from deepinfer_kernels_cuda.native import read_source
from hypothesis import given
from hypothesis import strategies as st


@given(t=st.integers(1, routing._TWO_LAUNCHES), d=st.integers(1, 16384), alone=st.booleans())
def test_spans_cover_the_columns_and_all_blocks_fit(t: int, d: int, alone: bool) -> None:
    tiles, spans, steps, span = routing._cut(t, d, alone=alone)
    assert span * (spans - 1) < steps <= span * spans, "no span is empty"
    assert (steps - 1) * 64 < d <= steps * 64
    assert (tiles - 1) * 64 < t <= tiles * 64
    assert tiles * 4 * spans <= 132, "blocks that wait for each other are on the card at once"
    if t <= routing._ONE_LAUNCH:
        assert spans * t * 384 <= 16 * 128 * 384, "the parts fit into the mail"
        assert spans <= 16, "two spans for each of eight warps"


@given(t=st.integers(1, 4096), experts=st.integers(1, 2048), d=st.integers(1, 16384), wide=st.booleans())
def test_a_sum_has_as_many_parts_as_a_selection_is_built_for(t: int, experts: int, d: int, wide: bool) -> None:
    built = {spec.defines for spec in _NATIVE if spec.source == "router.cu"}
    assert {("ITEMS=12",), *(("ITEMS=12", f"PARTS={parts}") for parts in routing.PARTS[1:])} <= built
    assert routing._cut(t, d, alone=True)[1] in routing.PARTS
    cut = routing._split(t, experts, d, wide)
    spans = -(-d // cut.span)
    assert spans in routing.PARTS
    tiles = -(-t // cut.tokens) * -(-experts // cut.experts)
    assert spans == 1 or spans * tiles <= 132 + tiles / 2, "about one block on each multiprocessor"


@pytest.mark.parametrize(
    ("t", "parts"), [(1, 16), (64, 16), (65, 16), (128, 16), (129, 10), (192, 10), (193, 8), (256, 8)]
)
def test_v41_is_cut_as_finely_as_the_card_takes_it(t: int, parts: int) -> None:
    assert routing._cut(t, 5120, alone=t > routing._ONE_LAUNCH)[1] == parts


@given(t=st.integers(1, 10**6), experts=st.integers(1, 2048), d=st.integers(1, 16384))
def test_parts_of_the_library_are_equal_and_long(t: int, experts: int, d: int) -> None:
    parts = routing._library_parts(t, experts, d)
    assert d % parts == 0
    assert parts == 1 or (d // parts >= 1024 and d // parts % 64 == 0), "vectors of a part stay where they were"
    assert parts >= routing._library_parts(t + 1, experts, d), "more tokens, no more parts"


def test_partial_products_add_up_wherever_rows_lie() -> None:
    x, weight = torch.randn(6, 5121, dtype=torch.float64)[:, :5120], torch.randn(8, 5120, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "bmm", lambda a, b, out_dtype: (a @ b).to(out_dtype))  # no out_dtype without a GPU
        part = routing._logits_library(x, weight, 4)
    assert part.shape == (4, 6, 8)
    torch.testing.assert_close(
        part.sum(0), (x @ weight.T).float(), rtol=1e-4, atol=1e-3
    )  # rounded to float32 four times


def test_rough_scores_are_as_near_as_the_kernel_takes_them_to_be() -> None:
    """Experts that come up to the bound within twice this error get exact keys: one that does not is never among the best."""
    source = read_source("router.cuh")
    found = re.search(r"fmaf\(fmaf\(fmaf\((\S+)f, u, (\S+)f\), u, (\S+)f\), u, fmaxf\(logit, 0.0f\)\)", source)
    error = re.search(r"ROUGH = (\S+)f;", source)
    assert found
    assert error
    a, b, c = map(float, found.groups())
    x = torch.linspace(-40, 40, 1_000_001, dtype=torch.float64)
    u = torch.exp(-x.abs())
    rough = (((a * u + b) * u + c) * u + x.clamp_min(0)).sqrt()
    worst = (rough - torch.nn.functional.softplus(x, threshold=1000).sqrt()).abs().max().item()
    assert 0.5 * float(error[1]) < worst < float(error[1]) - 1e-5, "rounding and approximate functions stay below 1e-5"
