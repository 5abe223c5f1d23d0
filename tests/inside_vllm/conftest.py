"""Tests inside stock vLLM on a CPU. Without vLLM they are not collected, and the header says so."""

import importlib.util
import json
import os

import pytest

HAS_VLLM = importlib.util.find_spec("vllm") is not None
collect_ignore_glob = [] if HAS_VLLM else ["test_*.py"]

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine core in this process, where a test can look
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def pytest_report_header(config):
    if not HAS_VLLM:
        return "tests/inside_vllm: left out, vLLM is not installed (uv run --extra vllm pytest tests/inside_vllm)"
    return None


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory):
    """A folder with a two-layer Llama config; vLLM fills it with dummy weights."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA))
    return folder


@pytest.fixture
def start_llm(tiny_llama):
    """Start vLLM on the tiny model; every engine of a test is shut down after it."""
    from vllm import LLM

    started = []

    def start(**options):
        defaults = {
            "model": str(tiny_llama), "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "float32",
            "max_model_len": 1024, "max_num_seqs": 8, "kv_cache_memory_bytes": 1 << 20, "block_size": 16,
            "disable_log_stats": False,
        }  # fmt: skip
        llm = LLM(**(defaults | options))
        started.append(llm)
        return llm

    yield start
    for llm in started:
        llm.llm_engine.engine_core.shutdown()
