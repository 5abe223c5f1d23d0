"""deepinfer-cache inside vLLM: a second run finds the first one's KV, and damage to it costs time, never a token."""

import random

import pytest
from vllm import SamplingParams

pytestmark = pytest.mark.vllm


def config(directory, **extra):
    return {
        "kv_connector": "DeepInferConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "deepinfer_cache.adapters.vllm.connector",
        "kv_connector_extra_config": {"directory": str(directory), "host_bytes": "1MiB"} | extra,
    }


def job():
    rng = random.Random(11)
    shared = [[rng.randrange(3, 512) for _ in range(160)] for _ in range(3)]
    return [shared[i % 3] + [rng.randrange(3, 512) for _ in range(33)] for i in range(12)]


def run(llm):
    """Answers, and the share of prompt tokens that had to be computed."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    prompts = job()
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    cached = sum(o.num_cached_tokens or 0 for o in outputs)
    return [list(o.outputs[0].token_ids) for o in outputs], 1 - cached / sum(map(len, prompts))


def pages(directory):
    return sorted(directory.glob("*/*/*.kv"))


def test_a_second_run_computes_less_than_a_twentieth(start_llm, tmp_path):
    plain, _ = run(start_llm(kv_cache_memory_bytes=1 << 22))
    first, computed_first = run(start_llm(kv_cache_memory_bytes=1 << 22, kv_transfer_config=config(tmp_path)))
    assert pages(tmp_path)
    second, computed_second = run(start_llm(kv_cache_memory_bytes=1 << 22, kv_transfer_config=config(tmp_path)))
    assert first == plain
    assert len({tuple(answer) for answer in plain}) == len(plain)  # answers depend on what was read
    assert second == plain
    assert computed_second < 0.05 < computed_first


@pytest.mark.parametrize("damage", ["flip", "cut", "foreign", "gone"])
def test_a_damaged_page_costs_time_and_no_token(start_llm, tmp_path, damage):
    options = {"kv_cache_memory_bytes": 1 << 22, "kv_transfer_config": config(tmp_path)}
    plain, _ = run(start_llm(**options))
    rng = random.Random(7)
    damaged = {}
    for page in pages(tmp_path)[::3]:
        data = bytearray(page.read_bytes())
        if damage == "flip":
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif damage == "cut":
            del data[rng.randrange(len(data)) :]
        elif damage == "foreign":
            data = bytearray(rng.randbytes(len(data)))
        if damage == "gone":
            page.unlink()
        else:
            page.write_bytes(data)
            damaged[page] = bytes(data)
    again, _ = run(start_llm(**options))
    assert again == plain
    assert not [page for page, data in damaged.items() if page.exists() and page.read_bytes() == data]


def test_an_unknown_option_is_named(start_llm, tmp_path):
    with pytest.raises(Exception, match="no option 'hostbytes'"):
        start_llm(kv_transfer_config=config(tmp_path, hostbytes=1))
