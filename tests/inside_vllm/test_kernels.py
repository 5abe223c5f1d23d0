"""deepinfer-kernels-cuda inside vLLM: layers are replaced when asked for and possible, and the log says why not.

There is no CUDA device here, so the kernel runs in Triton's interpreter.
"""

import json
import logging
import os
import subprocess
import sys

import pytest
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


ACTING = """
import json, sys
import torch
from vllm import LLM, SamplingParams

prompts, arguments, sampling = json.loads(sys.argv[1])
llm = LLM(**arguments)
with torch.profiler.profile() as profile:
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], SamplingParams(**sampling), use_tqdm=False)
calls = {event.key: event.count for event in profile.key_averages() if event.key.startswith("deepinfer_kernels::")}
print(json.dumps([[list(o.outputs[0].token_ids) for o in outputs], calls]))
"""


def test_the_kernel_acts_and_tokens_stay(start_llm, tiny_llama):
    prompts = [[5, 6, 7, 8] * 6, [9, 10, 11] * 5]
    sampling = {"temperature": 0, "max_tokens": 10, "ignore_eos": True, "detokenize": False}
    arguments = {
        "model": str(tiny_llama), "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 1024,
        "kv_cache_memory_bytes": 1 << 20, "block_size": 16,
    }  # fmt: skip
    outputs = start_llm().generate(
        [{"prompt_token_ids": p} for p in prompts], SamplingParams(**sampling), use_tqdm=False
    )
    plain = [list(o.outputs[0].token_ids) for o in outputs]
    # In a process of its own: Triton asks for its interpreter once, when it is imported.
    done = subprocess.run(
        [sys.executable, "-c", ACTING, json.dumps([prompts, arguments, sampling])],
        env=os.environ | {"DEEPINFER_KERNELS": "rms_norm", "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    replaced, calls = json.loads(done.stdout.splitlines()[-1])
    assert replaced == plain
    steps = calls["deepinfer_kernels::rms_norm"]  # the first norm of a step has no residual yet, its four others have
    assert steps >= sampling["max_tokens"]
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
