"""Which vLLM this adapter serves: the only file that looks at a version."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

SUPPORTED = "0.33."


def require_supported() -> None:
    """Raise ImportError with what to do when the installed vLLM is not the one this adapter is tested with."""
    installed = version("vllm")
    if not installed.startswith(SUPPORTED):
        raise ImportError(
            f"deepinfer-cache's connector is written for vLLM {SUPPORTED}x and vLLM {installed} is installed: "
            "drop --kv-transfer-config, or install vllm==0.33.0"
        )


def recompute_failed_loads(config: Any) -> None:
    """A page that cannot be read must cost time, not the request: vLLM's default is to fail it."""
    config.kv_load_failure_policy = "recompute"
