"""The entry point of `vllm.general_plugins`: inactive unless `DEEPINFER_STRUCTURED=1` asks for it."""

from __future__ import annotations

import logging
import os

SWITCH = "DEEPINFER_STRUCTURED"

logger = logging.getLogger("vllm.deepinfer_structured")


def register() -> None:
    """Route vLLM's structured outputs through this package. Called in every process of vLLM; repeating it is harmless."""
    if os.environ.get(SWITCH, "0").lower() in ("", "0", "false", "off"):
        return
    from deepinfer_structured.adapters.vllm import compat

    reason = compat.refuse_reason()
    if reason is not None:
        logger.warning("%s is set, but deepinfer-structured stays out: %s.", SWITCH, reason)
        return
    from deepinfer_structured.adapters.vllm.backend import DeepInferBackend, validate

    compat.replace_backend(DeepInferBackend)
    compat.wrap_validator(validate)
    logger.info("Structured outputs are enforced by deepinfer-structured.")
