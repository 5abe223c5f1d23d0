import sys
import types

from deepinfer_kernels_ascend import is_supported


def fake_torch_npu(available: bool) -> types.ModuleType:
    module = types.ModuleType("torch_npu")
    module.__spec__ = types.SimpleNamespace(name="torch_npu")
    module.npu = types.SimpleNamespace(is_available=lambda: available)
    return module


def test_names_the_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    monkeypatch.setattr("deepinfer_kernels_ascend.device.find_spec", lambda name: None)
    assert "pip install" in is_supported()


def test_says_when_no_device_answers(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", fake_torch_npu(available=False))
    assert "no Ascend device answers" in is_supported()


def test_none_when_a_device_answers(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", fake_torch_npu(available=True))
    assert is_supported() is None


def test_reports_a_broken_installation(monkeypatch):
    monkeypatch.setattr("deepinfer_kernels_ascend.device.find_spec", lambda name: object())

    def broken(name):
        raise OSError("libascendcl.so: cannot open shared object file")

    monkeypatch.setattr("deepinfer_kernels_ascend.device.importlib.import_module", broken)
    assert "libascendcl.so" in is_supported()
