"""deepinfer-cache inside vLLM, with a model of full and sliding-window layers: both are kept, both are needed for a hit."""

import json
import os
import random
import subprocess
import sys

import pytest
from vllm import SamplingParams

pytestmark = pytest.mark.vllm

WINDOW, SHARED, OWN, BLOCK = 40, 160, 33, 16
RUN = """
import json, os, sys
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1")
from vllm import LLM, SamplingParams
options, prompts = json.loads(sys.argv[1])
llm = LLM(**options)
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
print(json.dumps([list(o.outputs[0].token_ids) for o in outputs]))
"""


@pytest.fixture(scope="module")
def window_llama(tiny_llama, tmp_path_factory):
    """The tiny Llama with a window in its first layer."""
    folder = tmp_path_factory.mktemp("window-llama")
    config = json.loads((tiny_llama / "config.json").read_text())
    config |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((tiny_llama / "model.safetensors").read_bytes())
    return folder


def options(model, store=None):
    chosen = {
        "model": str(model), "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 1024, "max_num_seqs": 8,
        "kv_cache_memory_bytes": 1 << 22, "block_size": BLOCK, "disable_log_stats": False,
    }  # fmt: skip
    if store is not None:
        chosen["kv_transfer_config"] = {
            "kv_connector": "DeepInferConnector",
            "kv_role": "kv_both",
            "kv_connector_module_path": "deepinfer_cache.adapters.vllm.connector",
            "kv_connector_extra_config": {"directory": str(store), "host_bytes": 0},
        }
    return chosen


def job():
    rng = random.Random(5)
    shared = [[rng.randrange(3, 512) for _ in range(SHARED)] for _ in range(3)]
    return [shared[i % 3] + [rng.randrange(3, 512) for _ in range(OWN)] for i in range(12)]


def run(llm):
    """Answers, the share of prompt tokens that was computed, and the connector's own counters."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    prompts = job()
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    cached = sum(o.num_cached_tokens or 0 for o in outputs)
    counters = {m.name.rpartition("cache_")[2]: m.value for m in llm.get_metrics() if "deepinfer_cache" in m.name}
    return [list(o.outputs[0].token_ids) for o in outputs], 1 - cached / sum(map(len, prompts)), counters


def groups(store):
    """Page files of each cache group: the window's pages are as many as those of full attention."""
    return [sorted(folder.glob("*/*.kv")) for folder in sorted(store.iterdir())]


@pytest.fixture(scope="module")
def plain(window_llama):
    """Answers without a connector."""
    from vllm import LLM

    llm = LLM(**options(window_llama))
    assert len(llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups) == 2
    answers = run(llm)[0]
    llm.llm_engine.engine_core.shutdown()
    assert len({tuple(answer) for answer in answers}) == len(answers)  # answers depend on what was read
    return answers


@pytest.fixture(scope="module")
def store(window_llama, plain, tmp_path_factory):
    """What another process has left behind."""
    folder = tmp_path_factory.mktemp("store")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    arguments = json.dumps([options(window_llama, folder), job()])
    done = subprocess.run([sys.executable, "-c", RUN, arguments], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == plain
    return folder


def copy(store, to):
    for page in store.glob("*/*/*.kv"):
        target = to / page.relative_to(store)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(page.read_bytes())
    return to


def test_a_second_process_computes_less_than_a_twentieth(start_llm, window_llama, store, plain, tmp_path):
    full, window = groups(store)
    assert len(full) == len(window) == 3 * SHARED // BLOCK + 12 * (OWN // BLOCK)
    answers, computed, counters = run(start_llm(**options(window_llama, copy(store, tmp_path))))
    assert answers == plain
    assert computed < 0.05
    assert counters["pages_lost"] == 0
    every_page = 2 * 12 * ((SHARED + OWN) // BLOCK)
    assert 0 < counters["pages_loaded"] < 0.7 * every_page  # of the window, only its last pages


def test_damage_in_either_group_costs_time_and_no_token(start_llm, window_llama, store, plain, tmp_path):
    copy(store, tmp_path)
    rng = random.Random(9)
    damaged = {}
    for pages in groups(tmp_path):
        for page in pages[::4]:
            data = bytearray(page.read_bytes())
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            page.write_bytes(data)
            damaged[page] = bytes(data)
    answers, computed, counters = run(start_llm(**options(window_llama, tmp_path)))
    assert answers == plain
    assert counters["pages_lost"] > 0
    assert computed < 1.0
    rewritten = [page for page, data in damaged.items() if page.exists() and page.read_bytes() != data]
    assert rewritten  # what was computed again is kept again


def test_a_hit_is_only_as_long_as_the_window_can_serve(start_llm, window_llama, store, plain, tmp_path):
    copy(store, tmp_path)
    for page in groups(tmp_path)[0]:  # one group loses everything: no hit is possible at all
        page.unlink()
    answers, computed, counters = run(start_llm(**options(window_llama, tmp_path)))
    assert answers == plain
    assert computed > 0.2  # what the device shares, and nothing from the store
    assert counters["pages_loaded"] == 0
