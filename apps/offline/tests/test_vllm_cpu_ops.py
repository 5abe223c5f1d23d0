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
    assert plugin.register() == plugin.PLATFORM


def test_plugin_names_a_version_that_it_does_not_know(monkeypatch, caplog):
    monkeypatch.setattr(plugin, "ACCELERATOR_NODES", ())
    monkeypatch.setattr(plugin, "version", lambda name: "0.34.1")
    assert plugin.register() is None
    assert "vLLM 0.34.1 is installed, this plugin knows 0.33.x only" in caplog.text


def test_plugin_leaves_a_cpu_build_alone(monkeypatch):
    monkeypatch.setattr(plugin, "ACCELERATOR_NODES", ())
    monkeypatch.setattr(plugin, "version", lambda name: "0.33.0+cpu")
    assert "CPU build" in plugin.reason_not_to_serve()
