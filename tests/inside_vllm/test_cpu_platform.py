"""DeepInfer's CPU platform for vLLM: what it decides before any model is loaded."""

import json
import os

import pytest
from vllm.engine.arg_utils import EngineArgs

pytestmark = pytest.mark.vllm

MIXTURE = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4,
    "num_experts_per_tok": 2, "vocab_size": 512, "max_position_embeddings": 256, "torch_dtype": "float32",
}  # fmt: skip


def configure(folder, **options):
    return EngineArgs(model=str(folder), skip_tokenizer_init=True, max_model_len=256, **options).create_engine_config()


def test_models_with_experts_are_refused_with_what_to_do(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    with pytest.raises(Exception, match=r"serves dense models, and MixtralForCausalLM has experts\. Run it on a GPU"):
        configure(tmp_path)


@pytest.mark.parametrize("wanted", [None, True, False])
def test_asynchronous_scheduling_is_vllms_decision(tiny_llama, wanted):
    chosen = {} if wanted is None else {"async_scheduling": wanted}
    assert configure(tiny_llama, **chosen).scheduler_config.async_scheduling is (wanted is not False)


def test_a_lone_worker_lives_with_the_engine_core(tiny_llama, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    assert configure(tiny_llama).parallel_config.distributed_executor_backend == "uni"
    chosen = configure(tiny_llama, distributed_executor_backend="mp")
    assert chosen.parallel_config.distributed_executor_backend == "mp"


def test_workers_beyond_the_memory_nodes_share_cores(tiny_llama, monkeypatch):
    from vllm.platforms import current_platform
    from vllm.utils.cpu_resource_utils import get_visible_memory_node

    nodes = get_visible_memory_node()
    workers = 2 * len(nodes)
    for name in ("VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")  # so that what the platform sets is undone afterwards
        monkeypatch.delenv(name)
    configure(tiny_llama)
    assert "VLLM_CPU_OMP_THREADS_BIND" not in os.environ
    configure(tiny_llama, tensor_parallel_size=workers)
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert int(os.environ["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // workers)
    assert {current_platform.device_id_to_physical_device_id(i) for i in range(workers)} == set(nodes)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    configure(tiny_llama, tensor_parallel_size=workers)
    assert os.environ["OMP_NUM_THREADS"] == "7"  # what the user has set stands


def test_no_cuda_kernels_are_built_in_the_background(monkeypatch):
    """The switch is the one that the library reads: with it no process is started, without it two are."""
    from humming.ops import utils as launcher
    from humming.utils import nvrtc
    from vllm.platforms import current_platform

    assert current_platform.is_cpu()
    started = []
    monkeypatch.setattr("humming.utils.jit.popen_and_reap", lambda command, **_: started.append(command))
    builds = [launcher.build_humming_launcher_in_bg, nvrtc.build_nvrtc_compile_binary_in_bg]
    for build in builds:
        build()
    assert not started
    monkeypatch.delenv("HUMMING_DISABLE_PARALLEL_BUILD")
    for build in builds:
        build()
    assert len(started) == 2
