import logging
import os

import pytest
import torch
from deepinfer_offline.engine.vllm.cpu import ops, plugin


def test_slot_mapping_of_a_mixed_batch():
    starts = torch.tensor([0, 3, 4], dtype=torch.int32)
    positions = torch.tensor([2, 3, 4, 9, 77, 77])
    table = torch.tensor([[5, 2, 0], [7, 1, 3]], dtype=torch.int32)
    slots = torch.zeros(6, dtype=torch.int64)
    ops.compute_slot_mapping(starts, positions, table, slots, 4)
    assert slots.tolist() == [22, 23, 8, 13, -1, -1]


def test_argmax_takes_the_lowest_index_on_ties():
    assert ops.greedy_argmax(torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 1.0]])).tolist() == [1, 0]


def test_registered_ops_are_callable_and_registration_repeats():
    ops.register()
    assert ops.register() is ops.register()
    assert torch.ops._C.greedy_argmax(torch.tensor([[0.0, 1.0]])).tolist() == [1]


def test_plugin_steps_aside_for_an_accelerator(monkeypatch, tmp_path):
    node = tmp_path / "nvidiactl"
    node.touch()
    monkeypatch.setattr(plugin, "ACCELERATOR_NODES", (str(node),))
    monkeypatch.setattr(plugin, "version", lambda name: "0.33.0")
    assert plugin.register() is None


def test_plugin_serves_the_stock_wheel_without_an_accelerator(monkeypatch):
    monkeypatch.setattr(plugin, "ACCELERATOR_NODES", ())
    monkeypatch.setattr(plugin, "version", lambda name: "0.33.0")
    monkeypatch.setenv(plugin.BUILD_SWITCH, "0")
    assert plugin.register() == plugin.PLATFORM
    assert os.environ[plugin.BUILD_SWITCH] == "0"  # what the user has set stands
    monkeypatch.delenv(plugin.BUILD_SWITCH)
    assert plugin.register() == plugin.PLATFORM
    assert os.environ[plugin.BUILD_SWITCH] == "1"


def test_plugin_names_a_version_that_it_does_not_know(monkeypatch, caplog):
    monkeypatch.setattr(plugin, "ACCELERATOR_NODES", ())
    monkeypatch.setattr(plugin, "version", lambda name: "0.34.1")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)  # vLLM turns it off, where it is imported
    assert plugin.register() is None
    assert "vLLM 0.34.1 is installed, this plugin knows 0.33.x only" in caplog.text


def test_plugin_leaves_a_cpu_build_alone(monkeypatch):
    monkeypatch.setattr(plugin, "ACCELERATOR_NODES", ())
    monkeypatch.setattr(plugin, "version", lambda name: "0.33.0+cpu")
    assert "CPU build" in plugin.reason_not_to_serve()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_kept_weights_multiply_like_float64(dtype, with_bias):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((5, 48), (32, 48)))
    bias = torch.randn(32, generator=generator).to(dtype) if with_bias else None
    handle = ops.create_linear(weight.t(), 32)
    out = torch.full((5, 32), torch.nan, dtype=dtype)
    ops.linear(out, x, bias, torch.tensor(handle))
    exact = x.double() @ weight.double().t() + (bias.double() if with_bias else 0)
    # One rounding of the result to its type: 2^-8 for bfloat16; float32 sums 48 products.
    torch.testing.assert_close(out.double(), exact, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    ops.release_linear(handle)
    with pytest.raises(KeyError):
        ops.linear(out, x, bias, torch.tensor(handle))


def test_gumbel_draws_follow_the_softmax_and_their_seeds():
    n, logits = 100_000, torch.tensor([1.0, 0.0, -1.0, -torch.inf])
    seeds = torch.arange(n) * 7919
    drawn = ops.gumbel_argmax(logits.expand(n, 4).contiguous(), seeds)
    share = torch.bincount(drawn, minlength=4) / n
    # Six standard deviations of a share of 100,000 draws: 6 * sqrt(0.25 / n) = 0.0095.
    torch.testing.assert_close(share, logits.softmax(0), atol=0.0095, rtol=0)
    again = ops.gumbel_argmax(logits.expand(5, 4).contiguous(), seeds[10:15])
    assert again.tolist() == drawn[10:15].tolist()
