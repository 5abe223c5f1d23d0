"""Each package alone in a clean environment with stock vLLM: it loads, it acts when asked, and it leaves no trace."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).resolve().parents[2]
UV = shutil.which("uv") or pytest.fail("uv is not on the PATH")

PRELUDE = """
import json, os, random
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
from vllm import LLM, SamplingParams

def start(**options):
    defaults = dict(skip_tokenizer_init=True, dtype="float32", max_model_len=256, max_num_seqs=4,
                    kv_cache_memory_bytes=1 << 20, block_size=16, disable_log_stats=False)
    return LLM(FOLDER, **(defaults | options))

def core(llm):
    return llm.llm_engine.engine_core.engine_core

def ask(llm):
    prompt = [5, 6, 7, 8] * 12
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False, allowed_token_ids=[5, 6, 7, 8])
    return list(llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0].outputs[0].token_ids)

def counters(llm):
    return {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
"""

# What one sees when a package acts, and what the same line of code sees without it.
ACTS = {
    "deepinfer-sched": """
llm = start(scheduler_cls="deepinfer_sched.adapters.vllm.scheduler.PrefixScheduler")
print(json.dumps({"acts": type(core(llm).scheduler.waiting).__name__ == "PrefixRequestQueue", "tokens": ask(llm)}))
""",
    "deepinfer-specdec": """
llm = start(speculative_config={"method": "custom_class", "num_speculative_tokens": 4,
                                "model": "deepinfer_specdec.adapters.vllm.proposer.SuffixProposer"},
            worker_extension_cls="deepinfer_specdec.adapters.vllm.worker.PlannedSpeculation")
tokens = ask(llm)
from vllm.v1.worker.gpu.spec_decode import adaptive_verification as module
planned = module.AdaptiveVerificationManager.__module__ == "deepinfer_specdec.adapters.vllm.verification"
print(json.dumps({"acts": planned and counters(llm)["vllm:spec_decode_num_draft_tokens"] > 0, "tokens": tokens}))
""",
    "deepinfer-structured": """
import vllm.v1.structured_output as manager
llm = start()
print(json.dumps({"acts": manager.GuidanceBackend.__module__.startswith("deepinfer_structured"), "tokens": ask(llm)}))
""",
}
ACTS["deepinfer-cache"] = """
kv = {"kv_connector": "DeepInferConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"directory": "kept"}}
llm = start(kv_transfer_config=kv)
tokens = ask(llm)
from pathlib import Path
print(json.dumps({"acts": len(list(Path("kept").glob("*/*/*.kv"))) == 3, "tokens": tokens}))
"""
ACTS["deepinfer-kernels-cuda"] = """
import torch
llm = start()
with torch.profiler.profile() as profile:
    tokens = ask(llm)
ran = {event.key for event in profile.key_averages()}
print(json.dumps({"acts": "deepinfer_kernels::add_rms_norm" in ran, "tokens": tokens}))
"""
SWITCHES = {
    "deepinfer-structured": {"DEEPINFER_STRUCTURED": "1"},
    "deepinfer-kernels-cuda": {"DEEPINFER_KERNELS": "rms_norm", "TRITON_INTERPRET": "1"},
}

STOCK = """
import vllm.v1.structured_output as manager
from vllm.model_executor.custom_op import op_registry_oot
from vllm.sampling_params import SamplingParams as Params
llm = start()
parts = [core(llm).scheduler, core(llm).scheduler.waiting, manager.GuidanceBackend, Params._validate_structured_outputs]
names = [getattr(part, "__module__", type(part).__module__) for part in parts]
stock = all(name.startswith("vllm.") for name in names) and not op_registry_oot
print(json.dumps({"stock": stock, "tokens": ask(llm)}))
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheels")
    subprocess.run([UV, "build", "--all-packages", "--wheel", "--no-sources", "-o", out, "-q"], cwd=ROOT, check=True)
    return {wheel.name.split("-")[0].replace("_", "-"): wheel for wheel in out.glob("*.whl")}


def locked_versions():
    """What vLLM runs with in the lock; llguidance excepted, where a vLLM user has the release that vLLM asks for."""
    command = [UV, "export", "-q", "--frozen", "--extra", "vllm", "--no-hashes", "--no-emit-workspace", "--no-header"]
    lines = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return "\n".join(line for line in lines if "==" in line and not line.startswith("llguidance"))


@pytest.fixture(scope="module")
def clean(wheels, tiny_llama, tmp_path_factory):
    """An environment with vLLM and what lets its wheel run on a CPU, nothing else; returns a runner of scripts."""
    folder = tmp_path_factory.mktemp("clean")
    python = folder / "venv/bin/python"
    subprocess.run([UV, "venv", "-q", "--python", sys.executable, folder / "venv"], check=True)
    constraints = folder / "constraints.txt"
    constraints.write_text(locked_versions())
    subprocess.run([UV, "pip", "install", "-q", "--python", python, "-c", constraints, "vllm==0.33.0"], check=True)

    def pip(*arguments):
        subprocess.run([UV, "pip", arguments[0], "-q", "--python", python, *arguments[1:]], check=True)

    pip("install", "--no-deps", wheels["deepinfer-offline"])  # only its vLLM platform is imported

    def run(code, **environment):
        script = PRELUDE.replace("FOLDER", repr(str(tiny_llama))) + code
        clean_environment = {k: v for k, v in os.environ.items() if not k.startswith(("DEEPINFER", "VLLM", "PYTEST"))}
        done = subprocess.run(
            [python, "-I", "-c", script],
            capture_output=True,
            text=True,
            cwd=folder,
            env=clean_environment | environment,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])

    run.pip = pip
    run.stock = run(STOCK)
    assert run.stock["stock"]
    return run


@pytest.mark.parametrize("package", ACTS)
def test_a_package_alone_acts_when_asked_and_leaves_nothing_behind(clean, wheels, package):
    clean.pip("install", "--no-deps", wheels[package])
    acting = clean(ACTS[package], **SWITCHES.get(package, {}))
    assert acting == {"acts": True, "tokens": clean.stock["tokens"]}
    assert clean(STOCK) == clean.stock, "the package changes vLLM although nobody asked"
    clean.pip("uninstall", package)
    assert clean(STOCK) == clean.stock
