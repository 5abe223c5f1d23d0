"""deepinfer-kernels-cuda inside vLLM: layers are replaced when asked for and possible, and the log says why not.

There is no CUDA device here, so the kernel runs in Triton's interpreter.
"""

import logging

import pytest
import torch
from vllm import SamplingParams

pytestmark = pytest.mark.vllm


@pytest.fixture
def table(monkeypatch):
    """vLLM's table of replaced layers, put back afterwards."""
    from vllm.model_executor import custom_op

    for name in ("DEEPINFER_KERNELS", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)
    before = dict(custom_op.op_registry_oot)
    yield custom_op.op_registry_oot
    custom_op.op_registry_oot.clear()
    custom_op.op_registry_oot.update(before)


@pytest.fixture
def log():
    """What the adapter says; vLLM's loggers do not propagate."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("vllm.deepinfer_kernels")
    level = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)


def ask(llm):
    prompts = [[5, 6, 7, 8] * 6, [9, 10, 11] * 5]
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in outputs]


def test_the_kernel_acts_and_tokens_stay(start_llm, table, monkeypatch, request):
    from deepinfer_kernels_cuda.adapters.vllm import plugin

    plain = ask(start_llm())
    log = request.getfixturevalue("log")  # only now: vLLM sets up its loggers when an engine starts
    monkeypatch.setenv("DEEPINFER_KERNELS", "rms_norm")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    plugin.register()
    plugin.register()
    assert [line for line in log if "replaces RMSNorm (rms_norm)" in line]
    llm = start_llm()
    with torch.profiler.profile() as profile:
        replaced = ask(llm)
    calls = {event.key: event.count for event in profile.key_averages()}
    assert replaced == plain
    steps = calls["deepinfer_kernels::rms_norm"]  # the first norm of a step has no residual yet, its four others have
    assert calls["deepinfer_kernels::add_rms_norm"] == 4 * steps


def test_unasked_nothing_changes(table, log):
    from deepinfer_kernels_cuda.adapters.vllm import plugin

    plugin.register()
    assert not table
    assert log == ["deepinfer-kernels-cuda is here: DEEPINFER_KERNELS=rms_norm"]


def test_without_a_device_the_log_says_so(table, log, monkeypatch):
    from deepinfer_kernels_cuda.adapters.vllm import plugin

    monkeypatch.setenv("DEEPINFER_KERNELS", "all")
    plugin.register()
    assert not table
    assert log == [
        "deepinfer-kernels-cuda does not replace rms_norm: "
        "no kernel for a machine without a CUDA device; there are kernels for 90, 100"
    ]


def test_a_seat_that_is_taken_is_left_alone(table, log, monkeypatch):
    from deepinfer_kernels_cuda.adapters.vllm import plugin
    from vllm.model_executor.layers.layernorm import RMSNorm

    class OtherNorm(RMSNorm):
        pass

    RMSNorm.register_oot(OtherNorm, name="RMSNorm")
    monkeypatch.setenv("DEEPINFER_KERNELS", "rms_norm")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    plugin.register()
    assert table["RMSNorm"] is OtherNorm
    assert "OtherNorm has taken its place already" in log[-1]


@pytest.mark.parametrize("installed", ["0.32.1", "0.34.0"])
def test_another_vllm_is_named_in_a_sentence(table, log, monkeypatch, installed):
    from deepinfer_kernels_cuda.adapters.vllm import compat, plugin

    monkeypatch.setattr(compat, "version", lambda _: installed)
    monkeypatch.setenv("DEEPINFER_KERNELS", "rms_norm")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    plugin.register()
    assert not table
    assert f"is written for vLLM 0.33.x and vLLM {installed} is installed" in log[-1]
