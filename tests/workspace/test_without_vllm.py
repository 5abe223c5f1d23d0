"""Adapters where there is no vLLM: whoever looks at them is told in a sentence what is missing."""

import importlib
import importlib.metadata
import logging
import runpy
import sys

import pytest

pytest.importorskip("torch")

# What a vLLM user names in a flag, and what a variable switches on in an entry point.
NAMED = [
    "deepinfer_sched.adapters.vllm.scheduler",
    "deepinfer_cache.adapters.vllm.connector",
    "deepinfer_specdec.adapters.vllm.proposer",
    "deepinfer_specdec.adapters.vllm.worker",
]
SWITCHES = {
    "deepinfer_structured.adapters.vllm.plugin": ("DEEPINFER_STRUCTURED", "1"),
    "deepinfer_kernels_cuda.adapters.vllm.plugin": ("DEEPINFER_KERNELS", "rms_norm"),
}


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch):
    """No vLLM, for adapters that are imported from now on, also where the environment has one."""
    real = importlib.metadata.version

    def version(name):
        if name == "vllm":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    held = {
        name: sys.modules.pop(name)
        for name in list(sys.modules)
        if name.startswith("deepinfer") and ".adapters." in name
    }
    yield
    for name in list(sys.modules):
        if name.startswith("deepinfer") and ".adapters." in name:
            del sys.modules[name]
    sys.modules.update(held)


@pytest.mark.parametrize("module", NAMED)
def test_what_a_flag_names_says_what_to_install(module):
    with pytest.raises(ImportError, match=r"vLLM, which is not installed: pip install vllm==0\.33\.0$") as refused:
        importlib.import_module(module)
    assert refused.type is ImportError


@pytest.mark.parametrize("module", SWITCHES)
def test_what_a_variable_switches_on_stays_out(module, monkeypatch, caplog):
    caplog.set_level(logging.WARNING, logger="vllm")
    monkeypatch.setenv(*SWITCHES[module])
    importlib.import_module(module).register()
    (said,) = [record.getMessage() for record in caplog.records]
    assert "vLLM is not installed: pip install vllm==0.33.0" in said


def list_kernels() -> int:
    with pytest.raises(SystemExit) as left:
        runpy.run_module("deepinfer_kernels_cuda.adapters.vllm", run_name="__main__")
    return left.value.code


def test_the_list_of_replaced_layers_has_every_op_and_its_reason(capsys):
    from deepinfer_kernels_cuda.capability import OPS

    assert list_kernels() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(OPS)
    assert all(line.split()[1] == "no" for line in lines)
    assert [line.split()[0] for line in lines if "vLLM is not installed" in line] == ["rms_norm"]


def test_a_layer_that_cannot_be_asked_for_is_refused_in_a_sentence(monkeypatch, capsys):
    monkeypatch.setenv("DEEPINFER_KERNELS", "norm")
    assert list_kernels() == 2
    assert capsys.readouterr() == ("", "DEEPINFER_KERNELS has 'norm'; it knows rms_norm, all\n")
