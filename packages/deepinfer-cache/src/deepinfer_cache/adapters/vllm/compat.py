"""Which vLLM this adapter serves: the only file that looks at a version."""

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


def require_supported() -> None:
    """Raise ImportError with what to do where vLLM is not installed, or not the one this adapter is tested with."""
    installed = installed_version()
    if installed is None:
        raise ImportError(
            "deepinfer-cache's connector runs inside vLLM, which is not installed: pip install vllm==0.33.0"
        )
    if not installed.startswith(SUPPORTED):
        raise ImportError(
            f"deepinfer-cache's connector is written for vLLM {SUPPORTED}x and vLLM {installed} is installed: "
            "drop --kv-transfer-config, or install vllm==0.33.0"
        )


def recompute_failed_loads(config: Any) -> None:
    """A page that cannot be read must cost time, not the request: vLLM's default is to fail it."""
    config.kv_load_failure_policy = "recompute"
