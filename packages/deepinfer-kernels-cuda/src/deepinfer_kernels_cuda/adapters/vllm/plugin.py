"""The entry point of `vllm.general_plugins`: replaces what `DEEPINFER_KERNELS` names. Without it nothing changes."""

from __future__ import annotations

import logging
import os

from deepinfer_kernels_cuda.adapters.vllm import compat, translate
from deepinfer_kernels_cuda.capability import interpreting, triton_reason

SWITCH = "DEEPINFER_KERNELS"
logger = logging.getLogger("vllm.deepinfer_kernels")


def decisions() -> list[translate.Decision]:
    """What is replaced here and why the rest is not.

    Raises:
        ValueError: `DEEPINFER_KERNELS` names an op that cannot be asked for.
    """
    asked = translate.read_switch(os.environ.get(SWITCH, ""))
    reason = compat.reason_not_to_serve() or triton_reason()
    if reason is not None:
        return translate.refuse(reason)
    return translate.decide(asked, compat.compute_capability(), interpreting())


def register() -> None:
    """Replace the layers that were asked for and that the device can run; say for each what was decided.

    vLLM calls this in every of its processes, sometimes twice; a second call changes nothing.
    """
    if not translate.read_switch(os.environ.get(SWITCH, "")):
        logger.debug("deepinfer-kernels-cuda is here: %s=%s", SWITCH, ",".join(translate.LAYERS))
        return
    for decision in decisions():
        if decision.op not in translate.LAYERS:
            continue
        if decision.layer is None:
            logger.warning("deepinfer-kernels-cuda does not replace %s: %s", decision.op, decision.reason)
            continue
        _replace(decision)


def _replace(decision: translate.Decision) -> None:
    from deepinfer_kernels_cuda.adapters.vllm import layers

    assert decision.layer is not None
    ours, table = layers.REPLACEMENTS[decision.layer], compat.replaced_layers()
    there = table.get(decision.layer)
    if there is ours:
        return
    if there is not None:
        logger.warning(
            "deepinfer-kernels-cuda does not replace %s: %s.%s has taken its place already",
            decision.layer, there.__module__, there.__qualname__,
        )  # fmt: skip
        return
    ours.register_oot(ours, name=decision.layer)
    logger.info("deepinfer-kernels-cuda replaces %s (%s): %s", decision.layer, decision.op, decision.reason)
