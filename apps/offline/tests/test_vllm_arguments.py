from dataclasses import dataclass
from typing import Any

import pytest
from deepinfer_offline.engine.base import EngineStartError
from deepinfer_offline.engine.options import EngineOptions
from deepinfer_offline.engine.vllm.arguments import engine_arguments


@dataclass
class Known:
    """Stands for vLLM's EngineArgs: the types that its fields have."""

    model: str = ""
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = False
    swap: int | None = None
    hf_overrides: dict[str, Any] | None = None
    trust_remote_code: bool = False
    # As in vLLM: a name that only type checkers can see.
    for_checkers: "Unknown | None" = None  # noqa: F821  # pyrefly: ignore


def arguments(**options):
    return engine_arguments(EngineOptions(**options), "folder", Known)


def test_options_reach_vllm_under_its_names():
    found = arguments(dtype="float32", max_running=7, max_tokens_per_step=99, tensor_parallel_size=2, kv_memory=1 << 20)
    assert found["dtype"] == "float32"
    assert found["max_num_seqs"] == 7
    assert found["max_num_batched_tokens"] == 99
    assert found["tensor_parallel_size"] == 2
    assert found["kv_cache_memory_bytes"] == 1 << 20


def test_parallelism_reaches_vllm_under_its_names():
    found = arguments(tensor_parallel_size=4, data_parallel_size=2, expert_parallel=True)
    assert found["tensor_parallel_size"] == 4
    assert found["data_parallel_size"] == 2
    assert found["enable_expert_parallel"] is True
    assert arguments()["enable_expert_parallel"] is False


def test_what_the_user_left_open_is_left_to_vllm():
    assert not {"max_model_len", "block_size", "max_num_batched_tokens", "kv_cache_memory_bytes"} & set(arguments())


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("gpu-memory-utilization", "0.5", 0.5),
        ("enforce_eager", "true", True),
        ("swap", "none", None),
        ("swap", "4", 4),
        ("for_checkers", "as it is", "as it is"),
        ("hf_overrides", '{"a": [1]}', {"a": [1]}),
    ],
)
def test_further_arguments_are_read_by_their_type(name, text, value):
    found = arguments(engine_args=((name, text),))
    assert found[name.replace("-", "_")] == value


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("gpu_mem", "0.5", "no such engine argument; near it: gpu_memory_utilization"),
        ("enforce_eagr", "1", "no such engine argument; near it: enforce_eager"),
        ("no_such", "1", "no such engine argument$"),
        ("enforce_eager", "perhaps", "'perhaps' is not of type bool"),
        ("gpu_memory_utilization", "half", "'half' is not of type float"),
        ("hf_overrides", "{a}", "is not JSON"),
        ("trust_remote_code", "true", "never does"),
    ],
)
def test_a_wrong_argument_is_named(name, text, says):
    with pytest.raises(EngineStartError, match=f"{name}.*{says}"):
        arguments(engine_args=((name, text),))


def test_window_strategy_is_the_native_engines():
    with pytest.raises(EngineStartError, match="--window-strategy exact: vLLM decides this itself"):
        arguments(window_strategy="exact")


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"speculative": "suffix"}, "--speculative suffix"),
        ({"speculative": "auto"}, "--speculative auto"),
        ({"decoder_replay": False}, "--no-decoder-replay"),
        ({"on_unsupported": "warn"}, "--on-unsupported warn"),
        ({"window_strategy": "exact"}, "--window-strategy exact"),
    ],
)
def test_what_vllm_would_not_do_is_refused_instead_of_left_out(options, flag):
    with pytest.raises(EngineStartError, match=f"^{flag}: .*--engine native"):
        arguments(**options)
