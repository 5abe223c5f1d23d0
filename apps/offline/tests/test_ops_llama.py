"""Linear layers, norms, activation, rotary scaling and the provider table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepinfer_offline.ops.cpu import providers
from deepinfer_offline.ops.cpu.build import cpu_kernels
from deepinfer_offline.ops.linear import OneDnnLinear, TorchLinear, onednn_reason, silu_mul
from deepinfer_offline.ops.norm import rms_norm
from deepinfer_offline.ops.registry import OpRegistry, OpRegistryError, Provider, anywhere, slower_notes
from deepinfer_offline.ops.rope import RopeConfig, rope_frequencies, rope_scale

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("kind", [TorchLinear, OneDnnLinear])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_linear_layers(kind: Any, dtype: torch.dtype, biased: bool) -> None:
    if kind is OneDnnLinear and onednn_reason("cpu", dtype):
        pytest.skip(str(onednn_reason("cpu", dtype)))
    torch.manual_seed(0)
    weight, x, rest = (torch.randn(*size).to(dtype) for size in ((48, 80), (7, 80), (7, 48)))
    bias = torch.randn(48).to(dtype) if biased else None
    layer = kind(weight, bias)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    # 80 products of O(1): float32 sums are good to 1e-5, bfloat16 results to half a unit of their 8 bits (size <= 40)
    tolerance = 1e-4 if dtype == torch.float32 else 0.15
    assert (layer(x).double() - expected).abs().max() < tolerance
    assert (layer.add_to(rest, x).double() - expected - rest.double()).abs().max() < 2 * tolerance


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_rows_beside_it(dtype: torch.dtype) -> None:
    if onednn_reason("cpu", dtype):
        pytest.skip(str(onednn_reason("cpu", dtype)))
    torch.manual_seed(0)
    layer = OneDnnLinear((torch.randn(960, 576) / 24).to(dtype))
    x = torch.randn(130, 576).to(dtype)
    together = layer(x)
    for rows in (1, 3, 64):
        assert torch.equal(layer(x[:rows]), together[:rows])


@pytest.mark.parametrize("width", [64, 576])
def test_row_kernels_equal_the_portable_ops(width: int) -> None:
    if providers.is_supported("cpu", torch.bfloat16) is not None:
        pytest.skip(str(cpu_kernels().reason))
    torch.manual_seed(0)
    x, weight = (torch.randn(33, width) * 3).bfloat16(), torch.randn(width).bfloat16()
    found = providers._rms_norm()(x, weight, 1e-5)
    assert torch.equal(found, rms_norm(x, weight, 1e-5)) or _units_apart(found, rms_norm(x, weight, 1e-5)) <= 1
    gates = torch.cat([torch.linspace(-80, 80, width).repeat(33, 1), torch.randn(33, width)], dim=1).bfloat16()
    # Gates below -80 would give subnormal products, which the processor rounds to zero.
    # silu is rounded to bfloat16 before it is multiplied on both sides; the exponentials differ in the last float32 bits
    assert _units_apart(providers._silu_mul()(gates), silu_mul(gates)) <= 1


def _units_apart(a: torch.Tensor, b: torch.Tensor) -> int:
    """Largest distance of two bfloat16 tensors in units of their last place."""
    codes = [t.contiguous().view(torch.int16).to(torch.int32) for t in (a, b)]
    ordered = [torch.where(c < 0, -(c & 0x7FFF), c) for c in codes]
    return int((ordered[0] - ordered[1]).abs().max())


def test_rms_norm_in_float64() -> None:
    x, weight = torch.randn(5, 48), torch.randn(48)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert (rms_norm(x, weight, 1e-5).double() - expected).abs().max() < 1e-5


SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    {"rope_type": "yarn", "factor": 16.0, "beta_fast": 24, "beta_slow": 2, "original_max_position_embeddings": 4096},
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: s["rope_type"])
def test_frequencies_equal_transformers(scaling: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    from deepinfer_offline.models.llama.config import parse_rope

    raw = {"rope_parameters": {"rope_theta": 500000.0, **scaling}, "max_position_embeddings": 131072}
    config = transformers.LlamaConfig(hidden_size=1024, num_attention_heads=8, head_dim=128, **raw)
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    ours = parse_rope(raw, 128)
    torch.testing.assert_close(rope_frequencies(ours), rotary.inv_freq, atol=0, rtol=2e-6)
    assert rope_scale(ours) == pytest.approx(rotary.attention_scaling)


def test_unknown_scalings_are_refused() -> None:
    with pytest.raises(ValueError, match="'ntk' is not one of default, linear, llama3, yarn"):
        RopeConfig(64, kind="ntk")


def test_the_best_supported_provider_is_chosen() -> None:
    table = OpRegistry()
    table.register(Provider("add", "plain", "portable", anywhere, lambda: "plain"))
    table.register(
        Provider("add", "fast", "kernel", lambda d, _: None if d == "cuda:0" else "needs CUDA", lambda: "fast")
    )
    assert table.select("add", "cpu", torch.float32).name == "plain"
    assert table.select("add", "cuda:0", torch.float32).name == "fast"
    rows = table.capabilities("cpu", torch.float32)
    assert [(row.provider, row.reason, row.chosen) for row in rows] == [
        ("fast", "needs CUDA", False),
        ("plain", None, True),
    ]


def test_a_faster_provider_is_missed_only_on_its_own_kind_of_device() -> None:
    table = OpRegistry()
    table.register(Provider("add", "plain", "portable", anywhere, lambda: 0))
    table.register(Provider("add", "gpu", "kernel", lambda *_: "not installed", lambda: 1, device="cuda"))
    even = Provider("add", "even", "kernel", anywhere, lambda: 2, lambda n: "odd" if n % 2 else None, device="cpu")
    table.register(even)
    missed = {n: table.missed("add", "cpu", torch.float32, n) for n in (2, 3)}
    assert missed == {2: None, 3: "even: odd"}
    assert table.missed("add", "cuda:1", torch.float32, 3) == "gpu: not installed"
    assert table.missed("add", "meta", torch.float32, 3) is None
    reasons = {"add": "even: odd", "mul": None, "sub": "even: odd", "div": "gpu: not installed"}
    assert slower_notes(reasons) == (
        "slower code serves add, sub (even: odd)",
        "slower code serves div (gpu: not installed)",
    )


def test_a_shape_can_rule_a_provider_out() -> None:
    table = OpRegistry()
    table.register(Provider("add", "plain", "portable", anywhere, lambda: 0))
    table.register(Provider("add", "even", "kernel", anywhere, lambda: 1, accepts=lambda n: "odd" if n % 2 else None))
    assert [table.select("add", "cpu", torch.float32, detail=n).name for n in (2, 3)] == ["even", "plain"]


def test_mistakes_in_the_table_are_named() -> None:
    table = OpRegistry()
    table.register(Provider("add", "fast", "kernel", lambda *_: "needs CUDA", lambda: 0))
    with pytest.raises(OpRegistryError, match="already has a provider 'fast'"):
        table.register(Provider("add", "fast", "kernel", anywhere, lambda: 0))
    with pytest.raises(OpRegistryError, match="fast: needs CUDA"):
        table.select("add", "cpu", torch.float32)
    with pytest.raises(OpRegistryError, match="no op 'sub'; there are add"):
        table.select("sub", "cpu", torch.float32)
