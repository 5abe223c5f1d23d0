"""The platform class: vLLM's own CPU platform with the ops, attention and defaults that torch alone needs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from vllm.platforms.cpu import CpuPlatform
from vllm.utils.cpu_resource_utils import get_visible_memory_node

from deepinfer_offline.engine.vllm.cpu import ops, speculation

if TYPE_CHECKING:
    from vllm.config import VllmConfig

BACKEND = "deepinfer_offline.engine.vllm.cpu.attention.TorchCpuBackend"


def share_cores(workers: int) -> None:
    """Let several workers run on one memory node, each with its share of the cores; what the user has set stands.

    vLLM binds each worker to a memory node of its own and stops where there are fewer nodes than workers.
    """
    if workers > len(get_visible_memory_node()):
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // workers)))


class TorchCpuPlatform(CpuPlatform):
    """A CPU, reached through torch alone: no compiled op of vLLM is needed."""

    @classmethod
    def import_kernels(cls) -> None:
        ops.register()

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        from vllm.utils import cpu_triton_utils

        for name, function in speculation.KERNELS.items():  # vLLM registers what it finds under these names
            setattr(cpu_triton_utils, name, function)
        super().register_triton_kernel_overrides()

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        if attn_selector_config.use_mla or attn_selector_config.use_sparse:
            raise NotImplementedError(
                "DeepInfer's CPU platform for vLLM serves models with plain attention. "
                "For DeepSig V4.1 on a CPU use the native engine: deepinfer run --engine native"
            )
        return BACKEND

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        from vllm.config import CompilationMode

        model = vllm_config.model_config
        if model is not None and model.is_moe:
            raise NotImplementedError(
                f"DeepInfer's CPU platform for vLLM serves dense models, and {model.architecture} has experts. "
                "Run it on a GPU; for DeepSig V4.1 on a CPU use the native engine: deepinfer run --engine native"
            )
        ops.register()
        compilation = vllm_config.compilation_config
        compilation.mode = CompilationMode.NONE  # inductor would need a C++ compiler and a minute at every start
        if "all" not in compilation.custom_ops and "none" not in compilation.custom_ops:
            compilation.custom_ops.append("none")  # forward_native of every layer
        scheduler = vllm_config.scheduler_config
        parallel = vllm_config.parallel_config
        planning, executor = scheduler.async_scheduling, parallel.distributed_executor_backend
        super().check_and_update_config(vllm_config)
        scheduler.async_scheduling = planning  # vLLM's CPU platform always turns it off; its CPU runner can do it
        # And it moves a lone worker to a process of its own, to pin its threads. The engine core then spins on a core
        # while it waits, so that one is set aside for it; in one process all cores compute.
        parallel.distributed_executor_backend = executor
        share_cores(parallel.local_world_size * parallel.data_parallel_size_local)

    @classmethod
    def device_id_to_physical_device_id(cls, device_id: int) -> int:
        """Return the memory node of a worker; workers go round the nodes that are there."""
        nodes = get_visible_memory_node()
        return nodes[device_id % len(nodes)]
