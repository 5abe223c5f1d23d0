"""Which vLLM this adapter serves: the only file that looks at a version."""

from __future__ import annotations

from importlib.metadata import version

SUPPORTED = "0.33."


def require_supported() -> None:
    """Raise ImportError with what to do when the installed vLLM is not the one this adapter is tested with."""
    installed = version("vllm")
    if not installed.startswith(SUPPORTED):
        raise ImportError(
            f"deepinfer-specdec's proposers are written for vLLM {SUPPORTED}x and vLLM {installed} is installed: "
            "drop --speculative-config, or install vllm==0.33.0"
        )
