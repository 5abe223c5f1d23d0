"""The entry point of `vllm.platform_plugins`: offers the CPU platform where nothing faster is there."""

from __future__ import annotations

import logging
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PLATFORM = "deepinfer_offline.engine.vllm.cpu.platform.TorchCpuPlatform"
SUPPORTED = "0.33."

# Device nodes that a driver of NVIDIA, AMD, Ascend or Intel creates. Asking torch instead would initialise a device
# context in the front-end process, before vLLM decides how to start its workers.
ACCELERATOR_NODES = ("/dev/nvidiactl", "/dev/kfd", "/dev/davinci_manager", "/dev/accel", "/dev/dri/renderD128")

# A dependency of vLLM's CUDA wheel (humming-kernels) builds CUDA kernels in the background when it is imported: two more
# processes for each one of vLLM's, which take the cores from the model for a minute and cannot succeed without CUDA.
BUILD_SWITCH = "HUMMING_DISABLE_PARALLEL_BUILD"

# vLLM configures only its own loggers at this point, so the one line must go through them to be seen.
logger = logging.getLogger("vllm.deepinfer")


def reason_not_to_serve() -> str | None:
    """Return why the CPU platform should stay out of the way here, or None when it should serve."""
    found = [node for node in ACCELERATOR_NODES if Path(node).exists()]
    if found:
        return f"an accelerator is here ({found[0]})"
    try:
        installed = version("vllm")
    except PackageNotFoundError:
        return "vLLM is not installed"
    if "cpu" in installed:
        return f"vLLM {installed} is a CPU build and brings its own kernels"
    if not installed.startswith(SUPPORTED):
        return f"vLLM {installed} is installed, this plugin knows {SUPPORTED}x only"
    return None


def register() -> str | None:
    """Return the platform's class path for vLLM, or None. Called by vLLM in every process, sometimes twice."""
    reason = reason_not_to_serve()
    if reason is None:
        os.environ.setdefault(BUILD_SWITCH, "1")
        logger.info("No accelerator found: DeepInfer runs vLLM on the CPU in plain torch.")
        return PLATFORM
    logger.log(
        logging.WARNING if "knows" in reason else logging.DEBUG, "DeepInfer's CPU platform is not used: %s.", reason
    )
    return None
