"""The platform class: vLLM's own CPU platform with the ops, attention and defaults that torch alone needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.platforms.cpu import CpuPlatform

from deepinfer_offline.engine.vllm.cpu import ops, speculation

if TYPE_CHECKING:
    from vllm.config import VllmConfig

BACKEND = "deepinfer_offline.engine.vllm.cpu.attention.TorchCpuBackend"


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

        ops.register()
        compilation = vllm_config.compilation_config
        compilation.mode = CompilationMode.NONE  # inductor would need a C++ compiler and a minute at every start
        if "all" not in compilation.custom_ops and "none" not in compilation.custom_ops:
            compilation.custom_ops.append("none")  # forward_native of every layer
        super().check_and_update_config(vllm_config)
