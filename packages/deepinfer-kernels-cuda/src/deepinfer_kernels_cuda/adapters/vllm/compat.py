"""Which vLLM this adapter serves: the only file that looks at a version or probes for a seam."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

SUPPORTED = "0.33."


def installed_version() -> str | None:
    """The version of vLLM here, or None where there is none."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        return None


def reason_not_to_serve() -> str | None:
    """Why nothing is replaced in vLLM here, in a sentence, or None."""
    installed = installed_version()
    if installed is None:
        return "vLLM is not installed: pip install vllm==0.33.0"
    if not installed.startswith(SUPPORTED):
        return (
            f"deepinfer-kernels-cuda's adapter is written for vLLM {SUPPORTED}x and vLLM {installed} is installed: "
            "unset DEEPINFER_KERNELS, or install vllm==0.33.0"
        )
    return None


def replaced_layers() -> dict[str, Any]:
    """vLLM's table of replaced layers: the name of one of its layer classes -> the class that is built instead."""
    from vllm.model_executor.custom_op import op_registry_oot

    return op_registry_oot


def compute_capability() -> int:
    """Compute capability of the first CUDA device as 90, 100, ...; 0 without one. Starts no CUDA context."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return 0
    found = current_platform.get_device_capability()
    return found.to_int() if found is not None else 0
