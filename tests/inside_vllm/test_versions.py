"""Another vLLM than ours: every adapter says so in a sentence, and none stands in the way of a vLLM that did not ask for it."""

import importlib
import importlib.metadata
import logging
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).resolve().parents[2]
OTHERS = ["0.32.1", "0.34.0"]

# What a vLLM user names in a flag. vLLM imports it, and prints what the import raises.
NAMED = [
    "deepinfer_sched.adapters.vllm.scheduler",
    "deepinfer_cache.adapters.vllm.connector",
    "deepinfer_specdec.adapters.vllm.proposer",
    "deepinfer_specdec.adapters.vllm.worker",
]
# What a variable switches on in an entry point, which vLLM calls in each of its processes.
SWITCHES = {
    "deepinfer_structured.adapters.vllm.plugin": ("DEEPINFER_STRUCTURED", "1"),
    "deepinfer_kernels_cuda.adapters.vllm.plugin": ("DEEPINFER_KERNELS", "rms_norm"),
}
ADAPTERS = sorted(
    ".".join(path.parts[-3:]) for path in ROOT.glob("packages/*/src/*/adapters/vllm") if (path / "plugin.py").exists()
)


@pytest.fixture(autouse=True)
def heard(monkeypatch, caplog):
    """A vLLM that an earlier test imported has made its logger deaf to warnings and keeps them from `caplog`."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.WARNING, logger="vllm")


@pytest.fixture(params=OTHERS)
def other(request, monkeypatch):
    """Pretend that this vLLM is installed, for adapters that are imported from now on."""
    real = importlib.metadata.version
    fake = {"vllm": request.param}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: fake.get(name) or real(name))
    for name in [name for name in sys.modules if ".adapters.vllm" in name and name.startswith("deepinfer")]:
        monkeypatch.delitem(sys.modules, name)
    before = set(sys.modules)
    yield request.param
    for name in set(sys.modules) - before:
        if ".adapters.vllm" in name:
            del sys.modules[name]


@pytest.mark.parametrize("module", NAMED)
def test_what_a_flag_names_refuses_in_a_sentence(other, module):
    with pytest.raises(ImportError) as refused:
        importlib.import_module(module)
    sentence = str(refused.value)
    assert f"vLLM 0.33.x and vLLM {other} is installed" in sentence
    assert sentence.endswith("or install vllm==0.33.0")
    assert "\n" not in sentence


@pytest.mark.parametrize("module", SWITCHES)
def test_what_a_variable_switches_on_stays_out_and_says_so(other, module, monkeypatch, caplog):
    monkeypatch.setenv(*SWITCHES[module])
    importlib.import_module(module).register()
    (said,) = [record for record in caplog.records if record.name.startswith("vllm.deepinfer")]
    assert f"vLLM 0.33.x and vLLM {other} is installed" in said.getMessage()
    assert said.exc_info is None


def test_every_adapter_is_looked_at():
    """A new adapter has to be named above: by its switch, or by what a flag names."""
    named = {name.rsplit(".", 1)[0] for name in [*NAMED, *SWITCHES]}
    assert named == set(ADAPTERS)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_installed_package_that_nobody_asked_for_lets_any_vllm_start(other, adapter, monkeypatch):
    """vLLM does not catch what an entry point raises, so with a vLLM whose modules lie elsewhere it must not raise."""
    for variable, _ in SWITCHES.values():
        monkeypatch.delenv(variable, raising=False)
    for moved in ("vllm.distributed.kv_transfer.kv_connector.factory", "vllm.v1.structured_output"):
        monkeypatch.setitem(sys.modules, moved, None)  # importing it raises ImportError
    importlib.import_module(f"{adapter}.plugin").register()


def test_the_cpu_platform_stays_out_of_another_vllm(other, caplog, monkeypatch):
    from deepinfer_offline.engine.vllm.cpu import plugin

    monkeypatch.setattr(plugin, "version", importlib.metadata.version)
    monkeypatch.setattr(plugin, "ACCELERATOR_NODES", ())
    assert plugin.register() is None
    assert f"vLLM {other} is installed, this plugin knows 0.33.x only" in caplog.text


def run_job(folder, monkeypatch, capfd):
    from deepinfer_offline.cli.main import call
    from deepinfer_offline.engine import factory

    monkeypatch.setattr(factory, "_vllm_folder", lambda options, source: folder)  # the refusal comes before any loading
    (folder / "in.jsonl").write_text(
        '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}\n'
    )
    code = call(["run", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"), "--engine", "vllm", "--quiet"])
    return code, "".join(capfd.readouterr())


@pytest.mark.parametrize("installed", OTHERS)
def test_deepinfer_run_says_which_vllm_it_needs(installed, tmp_path, monkeypatch, capfd):
    import vllm

    monkeypatch.setattr(vllm, "__version__", installed)
    code, said = run_job(tmp_path, monkeypatch, capfd)
    assert code != 0
    assert f"vLLM {installed} is installed; this DeepInfer is built and tested on 0.33.x" in said
    assert "--engine native" in said
    assert "Traceback" not in said


def test_deepinfer_run_says_what_to_install_where_vllm_does_not_import(tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "vllm", None)
    code, said = run_job(tmp_path, monkeypatch, capfd)
    assert code != 0
    assert "pip install vllm==0.33.0" in said
    assert "Traceback" not in said
