"""Which vLLM this adapter serves: the only file that looks at a version."""

from __future__ import annotations

from importlib.metadata import version

SUPPORTED = "0.33."


def require_supported() -> None:
    """Raise ImportError with what to do when the installed vLLM is not the one this adapter was written and tested for."""
    installed = version("vllm")
    if not installed.startswith(SUPPORTED):
        raise ImportError(
            f"deepinfer-sched's scheduler is written for vLLM {SUPPORTED}x and vLLM {installed} is installed: "
            "drop --scheduler-cls, or install vllm==0.33.0"
        )
