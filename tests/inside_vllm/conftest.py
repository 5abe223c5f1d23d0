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
    "tie_word_embeddings": False,
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
    """A folder with a two-layer Llama whose random weights are large enough that answers depend on every token read."""
    import torch
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("tiny-llama")
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA))
    generator = torch.Generator().manual_seed(0)
    hidden, inner, kv = TINY_LLAMA["hidden_size"], TINY_LLAMA["intermediate_size"], 32
    shapes = {
        "model.embed_tokens.weight": (TINY_LLAMA["vocab_size"], hidden),
        "lm_head.weight": (TINY_LLAMA["vocab_size"], hidden),
    }
    for i in range(TINY_LLAMA["num_hidden_layers"]):
        at, ff = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        shapes |= {f"{at}.q_proj.weight": (hidden, hidden), f"{at}.o_proj.weight": (hidden, hidden)}
        shapes |= {f"{at}.k_proj.weight": (kv, hidden), f"{at}.v_proj.weight": (kv, hidden)}
        shapes |= {f"{ff}.gate_proj.weight": (inner, hidden), f"{ff}.up_proj.weight": (inner, hidden)}
        shapes |= {f"{ff}.down_proj.weight": (hidden, inner)}
    tensors = {name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5 * 2 for name, shape in shapes.items()}
    norms = [
        "model.norm",
        *(f"model.layers.{i}.{n}" for i in range(2) for n in ("input_layernorm", "post_attention_layernorm")),
    ]
    tensors |= {f"{name}.weight": torch.ones(hidden) for name in norms}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def byte_model(tiny_llama, tmp_path_factory):
    """The tiny Llama with a tokenizer of one token a byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("byte-llama")
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((tiny_llama / name).read_bytes())
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {c: 3 + i for i, c in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "bos_token": "<s>",
        "pad_token": "<pad>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


@pytest.fixture
def start_llm(tiny_llama):
    """Start vLLM on the tiny model. One engine lives at a time: vLLM keeps its KV connector in a global."""
    from vllm import LLM

    running = []

    def stop():
        while running:
            running.pop().llm_engine.engine_core.shutdown()

    def start(**options):
        stop()
        defaults = {
            "model": str(tiny_llama), "skip_tokenizer_init": True, "dtype": "float32",
            "max_model_len": 1024, "max_num_seqs": 8, "kv_cache_memory_bytes": 1 << 20, "block_size": 16,
            "disable_log_stats": False,
        }  # fmt: skip
        llm = LLM(**(defaults | options))
        running.append(llm)
        return llm

    yield start
    stop()
