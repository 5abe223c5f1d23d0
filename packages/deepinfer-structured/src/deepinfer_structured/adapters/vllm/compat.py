"""Which vLLM this adapter serves and the two names it replaces there: the only file that knows vLLM's layout."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

SUPPORTED = "0.33."

# vLLM has no registry of grammar backends: `StructuredOutputManager.grammar_init` picks a class by name. The class
# that it takes for "guidance" is looked up in its module at call time, and that one name is the seam.
MANAGER_MODULE = "vllm.v1.structured_output"
BACKEND_NAME = "GuidanceBackend"
CARRIER = "guidance"
VALIDATOR = "_validate_structured_outputs"


def installed_version() -> str | None:
    """The version of vLLM here, or None where there is none."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        return None


def refuse_reason() -> str | None:
    """Return why no vLLM here can be served, or None."""
    installed = installed_version()
    if installed is None:
        return "vLLM is not installed: pip install vllm==0.33.0"
    if not installed.startswith(SUPPORTED):
        return f"it is written for vLLM {SUPPORTED}x and vLLM {installed} is installed"
    missing = [name for name, found in probe().items() if not found]
    return f"vLLM {installed} lacks {', '.join(missing)}" if missing else None


def probe() -> dict[str, bool]:
    """Look for every name that the adapter touches."""
    manager, sampling = importlib.import_module(MANAGER_MODULE), importlib.import_module("vllm.sampling_params")
    return {
        f"{MANAGER_MODULE}.{BACKEND_NAME}": hasattr(manager, BACKEND_NAME),
        f"{MANAGER_MODULE}.StructuredOutputManager.grammar_init": hasattr(
            manager.StructuredOutputManager, "grammar_init"
        ),
        f"vllm.SamplingParams.{VALIDATOR}": hasattr(sampling.SamplingParams, VALIDATOR),
    }


def replace_backend(backend: type) -> None:
    """Make vLLM's manager build `backend` where it would build its guidance backend."""
    setattr(importlib.import_module(MANAGER_MODULE), BACKEND_NAME, backend)


def wrap_validator(wrapper: Any) -> None:
    """Replace the front end's check of `structured_outputs`; `wrapper` gets the original as its first argument."""
    params = importlib.import_module("vllm.sampling_params").SamplingParams
    original = getattr(params, VALIDATOR)
    if getattr(original, "deepinfer", False):
        return

    def validate(self: Any, model_config: Any, structured_outputs_config: Any, tokenizer: Any) -> None:
        wrapper(original, self, model_config, structured_outputs_config, tokenizer)

    validate.deepinfer = True  # type: ignore[attr-defined]
    setattr(params, VALIDATOR, validate)
